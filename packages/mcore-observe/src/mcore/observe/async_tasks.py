"""Event loops for threads without one, and asyncio tasks that report their errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, overload

__all__ = ["get_asyncio_loop", "trace_async_exceptions"]

logger = logging.getLogger(__name__)

_Task = TypeVar(
    "_Task", bound=Callable[..., Coroutine[Any, Any, Any]] | Callable[..., AsyncGenerator[Any, Any]]
)
_Func = TypeVar("_Func", bound=Callable[..., Any])
_OnError = Literal["exit", "raise"]
Kind = Literal["async function", "async generator", "generator", "function"]

_LOGGED = "_mcore_observe_logged"

_ASYNC_TASK_STATS: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
"""Calls and their total time in milliseconds, by the qualified name of the function."""

_stats_lock = threading.Lock()

_ASYNC_IO_LOOP: asyncio.AbstractEventLoop | None = None
"""The loop made for the main thread, None before that."""

_cache = threading.local()
# A loop inherited through a fork shares its selector with the parent. Keep it alive: closing it in
# the child, as garbage collection does, would stop the parent's events.
_inherited: list[asyncio.AbstractEventLoop] = []


def get_asyncio_loop(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """Return an event loop that this thread can use.

    Args:
        loop: Returned unchanged if given.

    Returns:
        The loop running in this thread, else the loop that an earlier call made for the thread,
        unless it is closed or predates a fork. Else a new loop, which becomes the thread's current
        one. The caller closes it.

    Example:
        >>> loop = get_asyncio_loop()
        >>> get_asyncio_loop() is loop
        True
        >>> loop.close()
    """
    global _ASYNC_IO_LOOP
    if loop is not None:
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    cached: asyncio.AbstractEventLoop | None = getattr(_cache, "loop", None)
    if cached is not None and not cached.is_closed():
        if _cache.pid == os.getpid():
            return cached
        _inherited.append(cached)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    _cache.loop, _cache.pid = loop, os.getpid()
    if threading.current_thread() is threading.main_thread():
        _ASYNC_IO_LOOP = loop
    return loop


@overload
def trace_async_exceptions(
    func: _Task, *, verbose: bool = False, on_error: _OnError = "exit"
) -> _Task: ...


@overload
def trace_async_exceptions(
    func: None = None, *, verbose: bool = False, on_error: _OnError = "exit"
) -> Callable[[_Func], _Func]: ...


def trace_async_exceptions(
    func: Callable[..., Any] | None = None, *, verbose: bool = False, on_error: _OnError = "exit"
) -> Any:
    """Decorate a function that runs as a task, to log its errors and end the process.

    An ``Exception`` is logged once at ERROR with its traceback, however many decorated calls it
    passes through. Cancellation, ``GeneratorExit``, ``KeyboardInterrupt`` and ``SystemExit`` pass
    untouched and unlogged.

    Args:
        func: A coroutine function or an async generator function. Leave it out to pass options.
        verbose: Count calls and their time in ``_ASYNC_TASK_STATS``, as ``[calls, total_ms]`` by
            qualified name, and log the averages at INFO after 1, 10, 100, ... calls. The time
            includes suspension. Cancelled calls and generators closed early do not count.
        on_error: ``"exit"`` ends the process: in the main thread with ``SystemExit(1)``, which the
            event loop re-raises. In another thread SIGTERM is sent to the process first, because
            ``SystemExit`` would end only that thread. ``"raise"`` re-raises the exception.

    Returns:
        A function of the same kind, or the decorator if ``func`` was left out. An async generator
        receives the values and exceptions sent to its wrapper, and is closed with it.

    Raises:
        TypeError: ``func`` is neither kind of function.
        ValueError: ``on_error`` is neither ``"exit"`` nor ``"raise"``.

    Example:
        >>> import asyncio
        >>> @trace_async_exceptions(on_error="raise")
        ... async def answer():
        ...     return 42
        >>> asyncio.run(answer())
        42
    """
    if on_error not in ("exit", "raise"):
        raise ValueError(f"got on_error={on_error!r}; expected 'exit' or 'raise'")
    if func is None:
        return functools.partial(_decorate, verbose=verbose, on_error=on_error)
    return _decorate(func, verbose=verbose, on_error=on_error)


def _decorate(func: Callable[..., Any], *, verbose: bool, on_error: _OnError) -> Callable[..., Any]:
    kind = kind_of(func)
    if kind not in ("async function", "async generator"):
        raise TypeError(
            f"trace_async_exceptions got {func!r}, a {kind}: decorate a function that is defined "
            "with async def"
        )
    name = getattr(func, "__name__", type(func).__name__)
    label = f"{kind} {name}"
    stats_key = getattr(func, "__qualname__", name) if verbose else None
    return wrap_lifetime(func, kind, lambda: _TracedCall(label, stats_key, on_error))


class _TracedCall:
    """Counts one call, and handles the exception that ends it."""

    def __init__(self, label: str, stats_key: str | None, on_error: _OnError) -> None:
        self._label = label
        self._stats_key = stats_key
        self._on_error = on_error

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *raised: Any) -> None:
        error: BaseException | None = raised[1]
        if error is not None and not isinstance(error, Exception):
            return
        if self._stats_key is not None:
            _count_call(self._stats_key, (time.perf_counter() - self._started) * 1e3)
        if error is not None:
            marks = vars(error)  # setattr would fail on exceptions that are frozen dataclasses
            if _LOGGED not in marks:
                marks[_LOGGED] = True
                logger.error("Exception in %s: %s", self._label, error, exc_info=error)
            if self._on_error == "exit":
                if threading.current_thread() is not threading.main_thread():
                    os.kill(os.getpid(), signal.SIGTERM)
                raise SystemExit(1) from error


def _count_call(key: str, elapsed_ms: float) -> None:
    with _stats_lock:
        entry = _ASYNC_TASK_STATS[key]
        entry[0] += 1
        entry[1] += elapsed_ms
        count, total_ms = int(entry[0]), entry[1]
    if _is_power_of_ten(count):
        logger.info(
            "%s completed in %.3f ms, lifetime avg: %.3f ms, lifetime cnt: %d",
            key,
            elapsed_ms,
            total_ms / count,
            count,
        )


def _is_power_of_ten(count: int) -> bool:
    while count % 10 == 0:
        count //= 10
    return count == 1


def kind_of(func: object) -> Kind:
    """Return the kind of a function. A partial has the kind of the function it wraps."""
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

    For coroutines and generators that is the life of the object, not the call that creates it. The
    manager receives the exception that ends it: ``GeneratorExit`` if a generator is closed early.
    """
    if kind == "async function":

        @functools.wraps(func)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            with around():
                return await func(*args, **kwargs)

        return run_coroutine
    if kind == "generator":

        @functools.wraps(func)
        def run_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with around():
                return (yield from func(*args, **kwargs))

        return run_generator
    if kind == "async generator":
        return _wrap_async_generator(func, around)
    raise ValueError(f"{func!r} is a plain function: open a with block in it instead")


def _wrap_async_generator(
    func: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with around():
            # Async generators have no "yield from": forward each value and exception.
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
