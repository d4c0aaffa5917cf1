"""Straggler detection, training logs, timers and metric sinks for distributed training."""

from mcore.observe._version import __version__

__all__ = ["__version__"]
