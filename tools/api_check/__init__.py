"""Compare the public names of the packages with those of their last releases."""
