"""The commands of the command line: list, describe, verify, compare and convert checkpoints."""
