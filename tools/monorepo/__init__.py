"""The repository's work on its distributions: isolation, plans, checks, releases."""
