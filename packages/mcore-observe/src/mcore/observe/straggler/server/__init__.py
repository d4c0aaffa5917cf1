"""The HTTP endpoint of the straggler detector on rank 0: control, metrics and a page."""
