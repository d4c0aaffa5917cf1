"""Process groups, device meshes, RNG streams, context-parallel slicing and sharded checkpoints."""

from mcore.parallel._version import __version__

__all__ = ["__version__"]
