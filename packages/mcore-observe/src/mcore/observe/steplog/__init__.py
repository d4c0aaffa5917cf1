"""The parts of the training log: what a step is, what it collects, formats and sends."""
