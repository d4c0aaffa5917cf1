"""The record that describes a deprecation.

A module of its own, which is imported on demand: ``dataclasses`` brings ``inspect`` along.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeprecationInfo:
    """What ``deprecated`` was told about an object.

    Attributes:
        version: The version in which the deprecation began.
        removal_version: The version that removes the object, if that is known.
        alternative: What to use instead, if there is something.
        reason: Why, if that was given.
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
