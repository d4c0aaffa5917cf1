"""Makes errors in asyncio tasks loud: they are logged, and by default end the process."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, overload

from mcore.observe.lifetimes import kind_of, wrap_lifetime

__all__ = ["trace_async_exceptions"]

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Sent = TypeVar("_Sent")
_Func = TypeVar("_Func", bound=Callable[..., Any])
_OnError = Literal["exit", "raise"]

_LOGGED = "_mcore_observe_logged"

_ASYNC_TASK_STATS: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
"""Calls and their total time in milliseconds, by the qualified name of the function."""

_stats_lock = threading.Lock()


@overload
def trace_async_exceptions(
    func: Callable[_P, Coroutine[Any, Any, _Result]],
    *,
    verbose: bool = False,
    on_error: _OnError = "exit",
) -> Callable[_P, Coroutine[Any, Any, _Result]]: ...


@overload
def trace_async_exceptions(
    func: Callable[_P, AsyncGenerator[_Item, _Sent]],
    *,
    verbose: bool = False,
    on_error: _OnError = "exit",
) -> Callable[_P, AsyncGenerator[_Item, _Sent]]: ...


@overload
def trace_async_exceptions(
    func: None = None, *, verbose: bool = False, on_error: _OnError = "exit"
) -> Callable[[_Func], _Func]: ...


def trace_async_exceptions(
    func: Callable[..., Any] | None = None,
    *,
    verbose: bool = False,
    on_error: _OnError = "exit",
) -> Any:
    """Decorate what runs in a task of its own, so that its errors do not go unseen.

    An ``Exception`` is logged once at ERROR with its traceback, however many decorated calls it
    passes. Cancellation, ``GeneratorExit``, ``KeyboardInterrupt`` and ``SystemExit`` pass
    untouched and unlogged.

    Args:
        func: A coroutine function or an async generator function; leave it out to give options.
        verbose: Count calls and their time in ``_ASYNC_TASK_STATS``, as ``[calls, total_ms]`` by
            qualified name, and log the averages at INFO after 1, 10, 100, ... calls. The time
            includes that in which the call was suspended. Calls that were cancelled and
            generators that were closed early do not count.
        on_error: ``"exit"`` ends the process: in the main thread with ``SystemExit(1)``, which the
            event loop passes on; in another thread, where that would end only the thread, with
            SIGTERM to the process before it. ``"raise"`` lets the exception continue.

    Returns:
        A function of the same kind, or the decorator if ``func`` was left out. Values and
        exceptions that are sent to an async generator reach it, and it is closed with its wrapper.

    Raises:
        TypeError: ``func`` is neither kind of function.
        ValueError: ``on_error`` is neither of the two.

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
            f"trace_async_exceptions got {func!r}, a {kind}; decorate a function that is defined "
            "with async def"
        )
    name = getattr(func, "__name__", type(func).__name__)
    label = f"{kind} {name}"
    stats_key = getattr(func, "__qualname__", name) if verbose else None
    return wrap_lifetime(func, kind, lambda: _TracedCall(label, stats_key, on_error))


class _TracedCall:
    """Watches one call: counts it, and deals with the exception that ends it."""

    def __init__(self, label: str, stats_key: str | None, on_error: _OnError) -> None:
        self._label = label
        self._stats_key = stats_key
        self._on_error = on_error

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if self._stats_key is not None:
            _count_call(self._stats_key, (time.perf_counter() - self._started) * 1e3)
        if error is not None:
            _log_once(self._label, error)
            if self._on_error == "exit":
                _exit(error)


def _log_once(label: str, error: Exception) -> None:
    # Past the class: exceptions may be frozen dataclasses.
    marks = vars(error)
    if _LOGGED not in marks:
        marks[_LOGGED] = True
        logger.error("Exception in %s: %s", label, error, exc_info=error)


def _exit(error: Exception) -> None:
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
