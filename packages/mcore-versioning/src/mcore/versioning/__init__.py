"""Version checks, experimental gates and deprecation for large-model code, without torch."""

from mcore.versioning._version import __version__

__all__ = ["__version__"]
