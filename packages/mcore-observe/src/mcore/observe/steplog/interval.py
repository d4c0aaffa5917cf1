"""Time, throughput and energy between two console lines."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from mcore.observe.host_reads import as_number
from mcore.observe.timers import Timers

__all__ = ["Interval", "IntervalClock", "IntervalFlops", "measure_energy"]

_TIMER = "interval-time"
_ANCHOR = "_flops_at_last_log"


@dataclass(frozen=True)
class Interval:
    """Figures of one interval; None is unknown.

    Attributes:
        seconds_per_iteration: Time of a step.
        tflops_per_device: TFLOP/s of a GPU.
        tflops: TFLOP/s of the job.
        joules_per_iteration: Energy of a GPU for a step.
        watts: Power of a GPU.
    """

    seconds_per_iteration: float | None
    tflops_per_device: float | None = None
    tflops: float | None = None
    joules_per_iteration: float | None = None
    watts: float | None = None


@dataclass
class IntervalClock:
    """Measures the time between console lines.

    The timer ``interval-time``, which the training loop starts, counts. Where it does not run,
    the time between calls counts.

    Attributes:
        anchor_s: Host time of the last line, or of the first call.
        calls: Calls since then.
    """

    anchor_s: float | None = None
    calls: int = 0

    def note_call(self) -> None:
        """Count a step."""
        if self.anchor_s is None:
            self.anchor_s = time.perf_counter()
        else:
            self.calls += 1

    def take_seconds(self, timers: Any, iterations: int) -> float | None:
        """Return the time since the last line and start again.

        A running timer has all ranks wait for each other; all ranks call it.

        Args:
            timers: The timers; those of other libraries serve as well.
            iterations: Steps since the last line.

        Returns:
            Seconds, or None when there is nothing to tell them from.
        """
        seconds = _timed_seconds(timers)
        if seconds is None and self.anchor_s is not None and self.calls:
            seconds = (time.perf_counter() - self.anchor_s) / self.calls * iterations
        self.anchor_s, self.calls = time.perf_counter(), 0
        return seconds


@dataclass
class IntervalFlops:
    """Counts floating-point operations between console lines.

    The anchor, the count at the last line, is ``_flops_at_last_log`` of the state.

    Attributes:
        is_whole: The interval starts where the anchor was set; False for the rest of an interval
            whose first part another process ran.
    """

    is_whole: bool = True

    def seed(self, global_state: Any, loaded_iteration: int) -> None:
        """Set a missing anchor: to 0 for a new run, to the present count for a resumed one.

        Args:
            global_state: Something with ``train_state.floating_point_operations_so_far``.
            loaded_iteration: The step that the run resumed at, 0 for a new one.
        """
        if as_number(getattr(global_state, _ANCHOR, None)) is not None:
            return
        so_far = _flops_so_far(global_state)
        if so_far is not None:
            self.is_whole = loaded_iteration == 0
            setattr(global_state, _ANCHOR, 0 if self.is_whole else so_far)

    def take(self, global_state: Any) -> float | None:
        """Return the operations of the whole job since the last line, and move the anchor.

        Args:
            global_state: As for :meth:`seed`.

        Returns:
            The number, or None when nobody counts, or the interval is not whole.
        """
        so_far = _flops_so_far(global_state)
        anchor = as_number(getattr(global_state, _ANCHOR, None))
        if so_far is None:
            return None
        setattr(global_state, _ANCHOR, so_far)
        is_whole, self.is_whole = self.is_whole, True
        if not is_whole or anchor is None:
            return None
        return max(so_far - anchor, 0)


def measure_energy(
    monitor: Any, iterations: int, seconds_per_iteration: float | None, world_size: int
) -> tuple[float | None, float | None]:
    """Read the energy since the last console line.

    All ranks call it: the monitor sums over the job.

    Args:
        monitor: Something with ``lap()``, as :class:`mcore.observe.EnergyMonitor`, or None.
        iterations: Steps since the last line.
        seconds_per_iteration: Time of a step, or None.
        world_size: Ranks of the job.

    Returns:
        Joules of a step and watts, both of one GPU; None where unknown.

    Example:
        >>> measure_energy(None, 10, 0.5, 1)
        (None, None)
    """
    joules = None if monitor is None else as_number(monitor.lap())
    if joules is None or not math.isfinite(joules):
        return None, None
    per_iteration = joules / iterations / world_size
    return per_iteration, per_iteration / seconds_per_iteration if seconds_per_iteration else None


def _timed_seconds(timers: Any) -> float | None:
    if isinstance(timers, Timers):
        timer = timers.find(_TIMER)
        seconds = None if timer is None else timer.elapsed(barrier=True)
        return seconds or None
    try:
        return as_number(timers(_TIMER).elapsed(barrier=True))
    except Exception:  # other libraries raise a bare Exception for timers that are switched off
        return None


def _flops_so_far(global_state: Any) -> float | None:
    count = as_number(getattr(global_state.train_state, "floating_point_operations_so_far", None))
    return count or None
