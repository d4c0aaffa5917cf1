"""Clocks of timers: the host's, and the accelerator's events."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "default_clock"]

# Beyond this many unread pairs, those that the device has passed are summed up and reused.
_MAX_OPEN_PAIRS = 256


class Clock(Protocol):
    """Measures ranges and hands over the seconds of those that ended."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def take(self) -> float: ...


class HostClock:
    """Measures ranges with the host's clock, after the accelerator has caught up if asked to.

    Args:
        sync: Wait for the accelerator, if there is one, at both ends of a range.

    Example:
        >>> clock = HostClock(sync=False)
        >>> clock.start()
        >>> clock.stop()
        >>> clock.take() > 0, clock.take()
        (True, 0.0)
    """

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync and torch.accelerator.is_available()
        self._began = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Open a range."""
        self._began = self._now()

    def stop(self) -> None:
        """Close the range."""
        self._seconds += self._now() - self._began

    def take(self) -> float:
        """Return the seconds of the ranges closed since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _now(self) -> float:
        if self._sync:
            torch.accelerator.synchronize()
        return time.perf_counter()


class DeviceClock:
    """Measures ranges with pairs of events on the current stream; waits only when it is read.

    Args:
        make_event: Returns an event with ``record``, ``synchronize``, ``query`` and
            ``elapsed_time`` in milliseconds, such as ``torch.Event(enable_timing=True)``.
    """

    def __init__(self, make_event: Any) -> None:
        self._make_event = make_event
        self._free: list[Any] = []
        self._begin: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def start(self) -> None:
        """Open a range: record an event."""
        self._begin = self._recorded_event()

    def stop(self) -> None:
        """Close the range: record an event, without waiting for it."""
        self._pairs.append((self._begin, self._recorded_event()))
        if len(self._pairs) >= _MAX_OPEN_PAIRS:
            self._fold([pair for pair in self._pairs if pair[1].query()])

    def take(self) -> float:
        """Wait for the last range and return the seconds of those closed since the last call."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
            self._fold(self._pairs)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _recorded_event(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _fold(self, finished: list[tuple[Any, Any]]) -> None:
        for begin, end in finished:
            self._seconds += begin.elapsed_time(end) / 1e3
            self._free += [begin, end]
        done = {id(end) for _, end in finished}
        self._pairs = [pair for pair in self._pairs if id(pair[1]) not in done]


def default_clock(sync: bool) -> Clock:
    """Choose a clock.

    Args:
        sync: Wait for the accelerator at both ends of a range.

    Returns:
        The host's clock if so, or without an accelerator; else the device's.

    Example:
        >>> default_clock(sync=True).take()
        0.0
    """
    if sync or not torch.accelerator.is_available():
        return HostClock(sync=sync)
    device = torch.accelerator.current_accelerator()
    return DeviceClock(lambda: torch.Event(device, enable_timing=True))
