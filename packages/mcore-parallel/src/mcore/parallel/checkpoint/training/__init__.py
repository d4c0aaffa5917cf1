"""Checkpoints of a run in two lines: its whole state, and a manager of a folder of them."""
