"""The training log: all ranks call it after every step, it writes to the console and to sinks."""

from mcore.observe.training_log.log import training_log

__all__ = ["training_log"]
