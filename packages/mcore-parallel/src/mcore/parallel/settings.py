"""Settings that may be absent, in a configuration that somebody else wrote."""

from __future__ import annotations


def is_switched_on(value: object) -> bool:
    """Return whether the value of a field such as ``fp8`` means "on".

    Args:
        value: Any value; a field that is absent is read as None.

    Returns:
        False for what equals None, False, the empty string or zero (numpy's too), else True.

    Example:
        >>> is_switched_on("hybrid"), is_switched_on(False), is_switched_on(object())
        (True, False, True)
    """
    try:
        return value not in (None, False, "", 0)
    except (RuntimeError, TypeError, ValueError):
        return True  # its comparisons have no truth value, such as those of a tensor
