"""Settings that may be absent, in a configuration that somebody else wrote."""

from __future__ import annotations


def is_switched_on(value: object) -> bool:
    """Return whether the value of a field such as ``fp8``, read as None if absent, means "on"."""
    try:
        return value not in (None, False, "", 0)
    except (RuntimeError, TypeError, ValueError):
        return True  # its comparisons have no truth value, such as those of a tensor
