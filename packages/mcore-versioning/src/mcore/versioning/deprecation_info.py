"""The record that describes a deprecation.

Imported on demand, because ``dataclasses`` imports ``inspect``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeprecationInfo:
    """The arguments of ``deprecated`` for an object.

    Attributes:
        version: The version in which the deprecation began.
        removal_version: The version that removes the object, if known.
        alternative: The replacement, if any.
        reason: Why the object is deprecated, if given.
        message: The text of the warning.

    Example:
        >>> DeprecationInfo("1.0.0", "2.0.0", None, None, "f is deprecated").removal_version
        '2.0.0'
    """

    version: str
    removal_version: str | None
    alternative: str | None
    reason: str | None
    message: str
