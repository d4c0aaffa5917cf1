"""The training log: called after every step by all ranks, writes to console and sinks."""

from mcore.observe.training_log.log import training_log

__all__ = ["training_log"]
