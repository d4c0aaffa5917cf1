"""The flag that tells layers that their graphs are being captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["graph_capturing", "is_graph_capturing"]

_capturing: ContextVar[bool] = ContextVar("mcore_modules_graph_capturing", default=False)


def is_graph_capturing() -> bool:
    """Return whether this thread is inside :func:`graph_capturing`.

    Example:
        >>> is_graph_capturing()
        False
    """
    return _capturing.get()


@contextmanager
def graph_capturing() -> Iterator[None]:
    """Tell layers inside the ``with`` block to run what goes into their graphs.

    Ends with the block, whatever is raised in it; may be nested.

    Example:
        >>> with graph_capturing():
        ...     is_graph_capturing()
        True
    """
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)
