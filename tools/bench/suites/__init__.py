"""One module a suite; each has ``run()``, which yields the rows of its table."""
