"""The plans of the writes and reads of all ranks, checked before any file or tensor changes."""
