"""The whole state of a training run, and the manager of its checkpoints."""
