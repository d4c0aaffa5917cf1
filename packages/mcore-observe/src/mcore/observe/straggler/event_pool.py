"""Timing events of an accelerator, kept for reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

__all__ = ["MIN_CAPACITY", "EventPair", "EventPool", "TimingEvent"]

MIN_CAPACITY = 65536  # events; a pool that is filled with more may hold those


class TimingEvent(Protocol):
    """What is used of ``torch.Event(device, enable_timing=True)``."""

    def record(self) -> Any: ...
    def synchronize(self) -> Any: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


EventPair: TypeAlias = "tuple[TimingEvent, TimingEvent]"


class EventPool:
    """Hands out pairs of events and takes them back. Any thread may use it.

    Args:
        make_event: Returns a new event.
        prefill: How many events to make in :meth:`fill`; the pool never makes more than the larger
            of this and 65536.

    Attributes:
        num_made: Events that exist.

    Example:
        >>> pool = EventPool(object, prefill=2)
        >>> pool.fill()
        >>> pair = pool.take()
        >>> pool.give_back([pair])
        >>> pool.num_made
        2
    """

    def __init__(self, make_event: Callable[[], Any], *, prefill: int) -> None:
        self._make_event = make_event
        self._prefill = prefill
        self._capacity = max(prefill, MIN_CAPACITY)
        self._lock = threading.Lock()
        self._free: list[EventPair] = []
        self.num_made = 0

    def fill(self) -> None:
        """Make events until there are as many as asked for."""
        with self._lock:
            while self.num_made < self._prefill:
                self._free.append(self._new_pair())

    def take(self) -> EventPair | None:
        """Return a pair, or None where all that may exist are in use."""
        try:
            return self._free.pop()
        except IndexError:
            with self._lock:
                return self._new_pair() if self.num_made + 2 <= self._capacity else None

    def give_back(self, pairs: Iterable[EventPair]) -> None:
        """Take pairs back."""
        self._free.extend(pairs)

    def clear(self) -> None:
        """Let go of the events that nobody uses."""
        with self._lock:
            free, self._free = self._free, []
            self.num_made -= 2 * len(free)

    def _new_pair(self) -> EventPair:
        self.num_made += 2
        return self._make_event(), self._make_event()
