"""One event loop for each thread that has none running."""

from __future__ import annotations

import asyncio
import os
import threading

__all__ = ["get_asyncio_loop"]

_ASYNC_IO_LOOP: asyncio.AbstractEventLoop | None = None
"""The loop that the main thread was given, None before that."""

_cache = threading.local()
# A loop that a fork inherited shares its selector with the parent: collecting, and so closing, it
# in the child would make the parent deaf.
_inherited: list[asyncio.AbstractEventLoop] = []


def get_asyncio_loop(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """Return an event loop that this thread can use.

    Args:
        loop: Returned as it is when given.

    Returns:
        The loop that is running in this thread; else the one that this function gave the thread
        before, unless it is closed or from before a fork; else a new one, which becomes the
        thread's current loop and is the caller's to close.

    Example:
        >>> loop = get_asyncio_loop()
        >>> get_asyncio_loop() is loop
        True
        >>> loop.close()
    """
    if loop is not None:
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _cached_loop() or _new_loop()


def _cached_loop() -> asyncio.AbstractEventLoop | None:
    cached: asyncio.AbstractEventLoop | None = getattr(_cache, "loop", None)
    if cached is None or cached.is_closed():
        return None
    if _cache.pid != os.getpid():
        _inherited.append(cached)
        return None
    return cached


def _new_loop() -> asyncio.AbstractEventLoop:
    global _ASYNC_IO_LOOP
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    _cache.loop, _cache.pid = loop, os.getpid()
    if threading.current_thread() is threading.main_thread():
        _ASYNC_IO_LOOP = loop
    return loop
