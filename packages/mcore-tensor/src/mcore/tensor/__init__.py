"""Memory buffers, viewless tensors, multi-tensor operations and DTensor helpers."""

from mcore.tensor._version import __version__

__all__ = ["__version__"]
