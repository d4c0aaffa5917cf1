"""The files of a checkpoint on disk, written durably and checked before use."""
