"""A run: its steps, its checkpoints, and the loop around them."""
