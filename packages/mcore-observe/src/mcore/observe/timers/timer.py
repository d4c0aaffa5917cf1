"""A named stopwatch, and the clocks of the host and of the accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mcore.parallel.torch_compat import is_distributed
from mcore.tensor.device import capture_query, current_device

# With this many open pairs of events, the pairs that the device has passed are summed and reused.
_MAX_OPEN_PAIRS = 256


class TimerLike(Protocol):
    """The methods of a timer, enabled or disabled."""

    def start(self, barrier: bool = False) -> None: ...
    def stop(self, barrier: bool = False) -> None: ...
    def reset(self) -> None: ...
    def elapsed(self, reset: bool = True, barrier: bool = False) -> float: ...
    def active_time(self) -> float: ...
    def set_elapsed(self, value: float) -> None: ...
    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None: ...


class Timer:
    """A stopwatch that adds up the ranges between ``start`` and ``stop``.

    Args:
        name: Name for messages.
        sync: True waits for the accelerator at both ends of a range and reads the host's clock.
            False records events on the accelerator's current stream and waits when the time is
            read. Without an accelerator both read the host's clock. While a graph is captured,
            True does not wait, and False does not measure the range.
        clock: The clock that measures the ranges. None chooses by ``sync``.

    Example:
        >>> timer = Timer("forward")
        >>> timer.start()
        >>> timer.stop()
        >>> timer.elapsed() > 0
        True
    """

    def __init__(self, name: str, *, sync: bool = True, clock: Clock | None = None) -> None:
        self.name = name
        if clock is None and (sync or not torch.accelerator.is_available()):
            clock = HostClock(sync=sync)
        elif clock is None:
            clock = DeviceClock(
                lambda: torch.Event(current_device(), enable_timing=True),
                capture_query(current_device()),
            )
        self._clock = clock
        self._running = False
        self._elapsed = 0.0
        self._active = 0.0
        self._barrier_group: dist.ProcessGroup | None = None

    @property
    def is_running(self) -> bool:
        """Whether a range is open."""
        return self._running

    def start(self, barrier: bool = False) -> None:
        """Open a range.

        Args:
            barrier: First wait for the other ranks of the barrier group. No effect if
                torch.distributed is not initialised.

        Raises:
            RuntimeError: The timer is already running.

        Example:
            >>> Timer("forward").start()
        """
        if self._running:
            raise RuntimeError(f"timer {self.name!r} is already running: call stop() first")
        if barrier:
            self._wait_for_ranks()
        self._clock.start()
        self._running = True

    def stop(self, barrier: bool = False) -> None:
        """Close the range and add it.

        Args:
            barrier: First wait for the other ranks, as in :meth:`start`.

        Raises:
            RuntimeError: The timer is not running.

        Example:
            >>> Timer("forward").stop()
            Traceback (most recent call last):
            ...
            RuntimeError: timer 'forward' is not running: call start() first
        """
        if not self._running:
            raise RuntimeError(f"timer {self.name!r} is not running: call start() first")
        if barrier:
            self._wait_for_ranks()
        self._clock.stop()
        self._running = False

    def reset(self) -> None:
        """Drop the elapsed time, and the open range if there is one.

        Example:
            >>> timer = Timer("forward")
            >>> timer.start()
            >>> timer.reset()
            >>> timer.elapsed()
            0.0
        """
        self._collect()
        self._elapsed = 0.0
        self._running = False

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return this rank's seconds since the last reset. A running timer continues.

        Args:
            reset: Start again from zero.
            barrier: A running timer first waits for the other ranks, as in :meth:`start`.

        Example:
            >>> Timer("forward").elapsed()
            0.0
        """
        was_running = self._running
        if was_running:
            self.stop(barrier=barrier)
        self._collect()
        seconds = self._elapsed
        if reset:
            self._elapsed = 0.0
        if was_running:
            self.start()
        return seconds

    def active_time(self) -> float:
        """Return this rank's seconds of all ranges since the timer was made, despite resets.

        Example:
            >>> Timer("forward").active_time()
            0.0
        """
        self._collect()
        return self._active

    def set_elapsed(self, value: float) -> None:
        """Set the elapsed time, in seconds.

        Example:
            >>> timer = Timer("forward")
            >>> timer.set_elapsed(2.5)
            >>> timer.elapsed()
            2.5
        """
        self._collect()
        self._elapsed = float(value)

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """Choose the ranks that ``barrier=True`` waits for. The default None is the world group.

        Example:
            >>> Timer("forward").set_barrier_group(None)
        """
        self._barrier_group = barrier_group

    def _collect(self) -> None:
        seconds = self._clock.take()
        self._elapsed += seconds
        self._active += seconds

    def _wait_for_ranks(self) -> None:
        if is_distributed():
            dist.barrier(group=self._barrier_group)


class DisabledTimer:
    """A timer above the measured level. Starting and stopping it does nothing."""

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def set_elapsed(self, value: float) -> None:
        """Do nothing."""

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """Do nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Raise RuntimeError: nothing was measured."""
        raise RuntimeError(
            "this timer is disabled because its level is above that of its Timers: raise their "
            "log_level to measure it"
        )

    def active_time(self) -> float:
        """Raise RuntimeError: nothing was measured."""
        return self.elapsed()


class Clock(Protocol):
    """Measures ranges and returns the seconds of those that ended."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def take(self) -> float: ...


class HostClock:
    """The host's clock. With ``sync`` it waits for the accelerator at both ends of a range."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync and torch.accelerator.is_available()
        self._is_capturing = capture_query(current_device())
        self._began = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Open a range."""
        self._began = self._read_clock()

    def stop(self) -> None:
        """Close the range."""
        self._seconds += self._read_clock() - self._began

    def take(self) -> float:
        """Return the seconds of the ranges closed since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _read_clock(self) -> float:
        if self._sync and not self._is_capturing():
            torch.accelerator.synchronize()
        return time.perf_counter()


class DeviceClock:
    """Pairs of events on the current stream. Only reading waits for the device.

    A graph cannot be captured with events that measure time: such ranges are dropped.
    """

    def __init__(self, make_event: Any, is_capturing: Callable[[], bool] = lambda: False) -> None:
        self._make_event = make_event
        self._is_capturing = is_capturing
        self._free: list[Any] = []
        self._begin: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def start(self) -> None:
        """Open a range: record an event."""
        self._begin = None if self._is_capturing() else self._record_event()

    def stop(self) -> None:
        """Close the range: record an event, without waiting for it."""
        if self._begin is None or self._is_capturing():
            return
        self._pairs.append((self._begin, self._record_event()))
        if len(self._pairs) >= _MAX_OPEN_PAIRS:
            self._fold([pair for pair in self._pairs if all(event.query() for event in pair)])

    def take(self) -> float:
        """Wait for the ranges closed since the last call and return their seconds."""
        # Both events of each range: they may be on several streams. The last usually ends last.
        for event in chain.from_iterable(map(reversed, reversed(self._pairs))):
            if not event.query():
                event.synchronize()
        self._fold(self._pairs)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record_event(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _fold(self, finished: list[tuple[Any, Any]]) -> None:
        for begin, end in finished:
            self._seconds += begin.elapsed_time(end) / 1e3
            self._free += [begin, end]
        done = {id(end) for _, end in finished}
        self._pairs = [pair for pair in self._pairs if id(pair[1]) not in done]
