"""What a checkpoint is on disk: files that are written durably and checked before use."""
