"""A package in a separate environment: its contents, and whether its tests pass there."""
