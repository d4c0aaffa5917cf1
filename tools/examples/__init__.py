"""One file a trainer: how the packages go into it."""
