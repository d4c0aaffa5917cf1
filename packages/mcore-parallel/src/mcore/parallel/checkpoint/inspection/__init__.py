"""What the command line does with checkpoints: list, describe, verify, compare, convert."""
