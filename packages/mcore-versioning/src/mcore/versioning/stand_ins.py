"""A decorator that does nothing, in place of one that could not be imported."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


class NullDecorator:
    """A decorator that returns the decorated object, and a context manager that does nothing."""

    __slots__ = ()

    def __call__(self, func: F) -> F:
        """Return ``func`` itself."""
        return func

    def __enter__(self) -> NullDecorator:
        """Return this object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let an exception pass."""


@overload
def null_decorator(func: F, /) -> F: ...
@overload
def null_decorator(*args: Any, **kwargs: Any) -> NullDecorator: ...
def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """Stand in for an optional decorator, with or without arguments, or for a context manager.

    It replaces ``triton.jit``, ``triton.autotune(configs=...)`` or ``nvtx.annotate("x")`` if the
    library is missing.

    Args:
        *args: Either the decorated function or class alone, or the arguments of the real decorator.
        **kwargs: Keyword arguments of the real decorator.

    Returns:
        The single positional argument itself, if it is callable and the only argument. Otherwise
        a decorator that returns the decorated object and also works in a ``with`` statement.

    Example:
        >>> @null_decorator
        ... def increment(x):
        ...     return x + 1
        >>> increment(1)
        2
        >>> @null_decorator(configs=[1], key=["n"])
        ... def double(x):
        ...     return 2 * x
        >>> with null_decorator("range"):
        ...     double(4)
        8
    """
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return NullDecorator()
