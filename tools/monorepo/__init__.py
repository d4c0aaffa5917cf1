"""What the repository does with its distributions: isolate, plan, check, release."""
