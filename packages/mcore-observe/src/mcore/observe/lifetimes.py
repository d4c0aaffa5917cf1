"""Wraps functions so that a context manager covers the whole life of what a call makes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Literal

__all__ = ["Kind", "kind_of", "wrap_lifetime"]

Kind = Literal["async function", "async generator", "generator", "function"]


def kind_of(func: object) -> Kind:
    """Say what a call of ``func`` makes.

    Args:
        func: A callable; a partial counts as what it calls, any other object as ``"function"``.

    Returns:
        ``"async function"``, ``"async generator"``, ``"generator"``, or ``"function"``.

    Example:
        >>> async def fetch(): ...
        >>> kind_of(fetch), kind_of(len)
        ('async function', 'function')
    """
    if inspect.iscoroutinefunction(func):
        return "async function"
    if inspect.isasyncgenfunction(func):
        return "async generator"
    if inspect.isgeneratorfunction(func):
        return "generator"
    return "function"


def wrap_lifetime(
    func: Callable[..., Any], kind: Kind, around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Wrap a function in a context manager that is open from the first step of a call to its end.

    For coroutines and generators that is not the call itself, which only makes the object, but
    the life of the object: from its first step until it returns, raises, is cancelled or closed.
    Values and exceptions that are sent to a generator reach the wrapped one.

    Args:
        func: What to wrap.
        kind: What a call makes, from :func:`kind_of`; not ``"function"``.
        around: Makes the context manager of one call; it sees the exception that ends the call,
            ``GeneratorExit`` for a generator that is closed early.

    Returns:
        A function of the same kind for the functions of :mod:`inspect`, with the metadata of
        ``func``.

    Raises:
        ValueError: ``kind`` is ``"function"``.

    Example:
        >>> from contextlib import ExitStack
        >>> def count():
        ...     yield 1
        >>> def around():
        ...     stack = ExitStack()
        ...     _ = stack.callback(print, "closed")
        ...     return stack
        >>> list(wrap_lifetime(count, "generator", around)())
        closed
        [1]
    """
    if kind == "async function":
        return _around_coroutine(func, around)
    if kind == "async generator":
        return _around_async_generator(func, around)
    if kind == "generator":
        return _around_generator(func, around)
    raise ValueError(f"{func!r} is a plain function, whose life is its call: write a with block")


def _around_coroutine(
    func: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with around():
            return await func(*args, **kwargs)

    return wrapper


def _around_generator(
    func: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with around():
            return (yield from func(*args, **kwargs))

    return wrapper


def _around_async_generator(
    func: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with around():
            inner = func(*args, **kwargs)
            step = inner.__anext__()
            while True:
                try:
                    item = await step
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    await inner.aclose()
                    raise
                except BaseException as thrown:
                    step = inner.athrow(thrown)
                else:
                    step = inner.asend(sent)

    return wrapper
