"""What each rank writes or reads, checked on all ranks before a byte is touched."""
