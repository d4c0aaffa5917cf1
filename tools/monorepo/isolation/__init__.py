"""A package in an environment of its own: what it brings, whether its tests pass there."""
