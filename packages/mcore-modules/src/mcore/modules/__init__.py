"""Megatron modules: configuration, precision, graphs, sharded state dicts and value heads."""

from mcore.modules._version import __version__

__all__ = ["__version__"]
