"""One named stopwatch that counts device work as well as host time."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from mcore.observe.timer_clocks import Clock, default_clock
from mcore.parallel.torch_compat import is_distributed

__all__ = ["DisabledTimer", "Timer", "TimerLike"]


class TimerLike(Protocol):
    """What callers may do with a timer, whether it runs or not."""

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
        name: What is timed, for messages.
        sync: True waits for the accelerator at both ends of a range and reads the host's clock.
            False records events on the accelerator's current stream and waits when the time is
            asked for. Without an accelerator both read the host's clock.
        clock: What measures the ranges; None chooses by ``sync``.

    Example:
        >>> timer = Timer("forward")
        >>> timer.start()
        >>> timer.stop()
        >>> timer.elapsed() > 0
        True
    """

    def __init__(self, name: str, *, sync: bool = True, clock: Clock | None = None) -> None:
        self.name = name
        self._clock = clock if clock is not None else default_clock(sync)
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
            barrier: First wait for the other ranks of the barrier group; a no-op when
                torch.distributed is not initialised.

        Raises:
            RuntimeError: The timer already runs.

        Example:
            >>> Timer("forward").start()
        """
        if self._running:
            raise RuntimeError(f"timer {self.name!r} already runs; call stop() first")
        if barrier:
            self._wait_for_ranks()
        self._clock.start()
        self._running = True

    def stop(self, barrier: bool = False) -> None:
        """Close the range and add it.

        Args:
            barrier: First wait for the other ranks, as in :meth:`start`.

        Raises:
            RuntimeError: The timer does not run.

        Example:
            >>> Timer("forward").stop()
            Traceback (most recent call last):
            ...
            RuntimeError: timer 'forward' does not run; call start() first
        """
        if not self._running:
            raise RuntimeError(f"timer {self.name!r} does not run; call start() first")
        if barrier:
            self._wait_for_ranks()
        self._clock.stop()
        self._running = False

    def reset(self) -> None:
        """Forget the elapsed time, and the open range if there is one.

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
        """Return the seconds since the last reset; a running timer goes on running.

        Args:
            reset: Start again from zero.
            barrier: A running timer first waits for the other ranks, as in :meth:`start`.

        Returns:
            Seconds on this rank.

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
        """Return the seconds of all closed ranges since the timer was made, resets or not.

        Returns:
            Seconds on this rank.

        Example:
            >>> Timer("forward").active_time()
            0.0
        """
        self._collect()
        return self._active

    def set_elapsed(self, value: float) -> None:
        """Replace the elapsed time.

        Args:
            value: Seconds.

        Example:
            >>> timer = Timer("forward")
            >>> timer.set_elapsed(2.5)
            >>> timer.elapsed()
            2.5
        """
        self._collect()
        self._elapsed = float(value)

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """Choose the ranks that ``barrier=True`` waits for.

        Args:
            barrier_group: The group; None, as at first, is the world group.

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
    """A timer finer than the level that is measured: starting and stopping it does nothing.

    Example:
        >>> timer = DisabledTimer()
        >>> timer.start()
        >>> timer.stop()
    """

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
        raise RuntimeError("this timer is disabled: its level is above that of its Timers")

    def active_time(self) -> float:
        """Raise RuntimeError: nothing was measured."""
        return self.elapsed()
