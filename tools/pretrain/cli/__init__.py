"""What the user typed, and the processes that it starts."""
