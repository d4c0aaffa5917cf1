"""One module per package; each has ``run()``, which yields the rows of its table."""
