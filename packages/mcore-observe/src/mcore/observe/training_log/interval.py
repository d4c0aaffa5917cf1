"""Time, throughput and energy between two console lines."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from mcore.observe.sinks.scalars import as_number
from mcore.observe.timers import Timers

_TIMER = "interval-time"
_ANCHOR = "_flops_at_last_log"


@dataclass(frozen=True)
class Interval:
    """Figures of one interval; energy and per-device figures are those of one GPU."""

    seconds_per_iteration: float | None = None
    tflops_per_device: float | None = None
    tflops: float | None = None
    joules_per_iteration: float | None = None
    watts: float | None = None


class IntervalClock:
    """Measures the time between console lines.

    It reads the timer ``interval-time``, which the training loop starts; where that does not run,
    the time between calls counts.
    """

    def __init__(self) -> None:
        self._anchor_s: float | None = None
        self._calls = 0

    def start(self) -> None:
        """Start now, not with the first step."""
        self._anchor_s = time.perf_counter()

    def note_steps(self, steps: int) -> None:
        """Count steps."""
        if self._anchor_s is None:
            self._anchor_s = time.perf_counter()
        else:
            self._calls += steps

    def leave_out(self, seconds: float) -> None:
        """Leave out what was no training, such as an evaluation."""
        if self._anchor_s is not None:
            self._anchor_s += seconds

    def take_seconds(self, timers: Any, iterations: int) -> float | None:
        """Return the time since the last line, if known, and start again.

        A running timer makes all ranks wait for each other; all ranks call it.
        """
        seconds = _timed_seconds(timers)
        if seconds is None and self._anchor_s is not None and self._calls:
            seconds = (time.perf_counter() - self._anchor_s) / self._calls * iterations
        self._anchor_s, self._calls = time.perf_counter(), 0
        return seconds


class IntervalFlops:
    """Counts floating-point operations between console lines.

    The anchor, the count at the last line, is ``_flops_at_last_log`` of the state. An interval
    that another process began is not whole.
    """

    def __init__(self) -> None:
        self._is_whole = True

    def seed(self, global_state: Any, loaded_iteration: int) -> None:
        """Set a missing anchor: to 0 for a new run, to the present count for a resumed one."""
        if as_number(getattr(global_state, _ANCHOR, None)) is not None:
            return
        so_far = _flops_so_far(global_state)
        if so_far is not None:
            self._is_whole = loaded_iteration == 0
            setattr(global_state, _ANCHOR, 0 if self._is_whole else so_far)

    def take(self, global_state: Any) -> float | None:
        """Return the operations of the job in a whole interval, if counted; move the anchor."""
        so_far = _flops_so_far(global_state)
        anchor = as_number(getattr(global_state, _ANCHOR, None))
        if so_far is None:
            return None
        setattr(global_state, _ANCHOR, so_far)
        is_whole, self._is_whole = self._is_whole, True
        if not is_whole or anchor is None:
            return None
        return max(so_far - anchor, 0)


def measure_interval(
    clock: IntervalClock,
    flops: IntervalFlops,
    global_state: Any,
    *,
    iterations: int,
    world_size: int,
) -> Interval:
    """Measure the interval that a console line ends; all ranks call it, and all sum the energy."""
    seconds = clock.take_seconds(getattr(global_state, "timers", None), iterations)
    operations = flops.take(global_state)
    tflops = operations / seconds / 1e12 if operations is not None and seconds else None
    per_iteration = None if seconds is None else seconds / iterations
    monitor = getattr(global_state, "energy_monitor", None)
    joules = None if monitor is None else as_number(monitor.lap())
    if joules is not None:
        joules = joules / iterations / world_size if math.isfinite(joules) else None
    return Interval(
        seconds_per_iteration=per_iteration,
        tflops_per_device=None if tflops is None else tflops / world_size,
        tflops=tflops,
        joules_per_iteration=joules,
        watts=joules / per_iteration if joules is not None and per_iteration else None,
    )


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
    return as_number(getattr(global_state.train_state, "floating_point_operations_so_far", None))
