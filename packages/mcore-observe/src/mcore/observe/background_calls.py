"""Runs calls in a thread, in their order, with a bound on how many may wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["BackgroundCalls"]


def _end() -> None:
    """The last call of a thread."""


class BackgroundCalls:
    """One thread that makes calls one after another; it starts with the first call.

    Unlike a pool of :mod:`concurrent.futures`, which stops taking work before the interpreter's
    exit functions run, it still works in those.

    Args:
        max_waiting: Calls that may wait; a further one waits for room.

    Example:
        >>> done = []
        >>> calls = BackgroundCalls(max_waiting=2)
        >>> for number in range(5):
        ...     calls.put(lambda number=number: done.append(number))
        >>> calls.drain()
        >>> done
        [0, 1, 2, 3, 4]
    """

    def __init__(self, max_waiting: int) -> None:
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue(max_waiting)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, call: Callable[[], object]) -> None:
        """Have a call made in the background.

        Args:
            call: What to call; its result is dropped.

        Raises:
            Exception: What an earlier call raised, once; this call is made all the same.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="mcore.observe background calls", daemon=True
            )
            self._thread.start()
        self._calls.put(call)
        self._raise_error()

    def drain(self) -> None:
        """Wait until all calls are made.

        Raises:
            Exception: What the first failing call raised since an error was last raised.
        """
        self._calls.join()
        self._raise_error()

    def close(self) -> None:
        """Wait until all calls are made and end the thread; a later call starts another one.

        Raises:
            Exception: As :meth:`drain`.
        """
        if self._thread is not None:
            self._calls.put(_end)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            except Exception as error:
                self._error = self._error or error
            finally:
                self._calls.task_done()
            if call is _end:
                return

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
