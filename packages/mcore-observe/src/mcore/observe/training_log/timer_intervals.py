"""The timers of a step over the sink interval and over the console interval.

The timers keep running between console lines; sinks get the difference since they last looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mcore.observe.timers import Timers, gather_seconds, longest_times

_LEVEL_1 = (
    "forward-backward",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "all-grads-sync",
    "params-all-gather",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "optimizer",
)
_LEVEL_2 = (
    "batch-generator",
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)

# In upstream order: each method of a Timers object, and the client that it writes to.
_FOREIGN_WRITERS = (
    ("write_to_wandb", "wandb_logger"),
    ("write_to_mlflow", "mlflow_logger"),
    ("write_to_comet", "comet_logger"),
)


def timer_names(level: int) -> tuple[str, ...]:
    """Return the timers that are shown: the phases of a step at level 1, of a pipeline at 2."""
    if level < 1:
        return ()
    return _LEVEL_1 if level < 2 else _LEVEL_1 + _LEVEL_2


@dataclass(frozen=True)
class IntervalTimes:
    """Seconds of all ranks, ``[world_size, len(names)]`` on the device of the collective."""

    names: tuple[str, ...]
    of_sinks: torch.Tensor | None
    of_console: torch.Tensor | None
    sink_iterations: int

    def longest(self) -> dict[str, float]:
        """Return ``{name}-time`` in seconds per step for the sinks; copies to the host."""
        if self.of_sinks is None:
            return {}
        return longest_times(self.names, self.of_sinks.tolist(), self.sink_iterations)


class TimerIntervals:
    """Remembers how much of the timers the sinks have seen, relative to the timers' last reset."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._seen_iterations = 0

    def gather(
        self, timers: Timers, level: int, iterations: int, *, sinks: bool, console: bool
    ) -> IntervalTimes:
        """Read the timers of all ranks for the sinks, the console, or both.

        One all-gather over the world group, none when no timer is shown; all ranks call it with
        the same arguments. ``iterations`` are the steps since the last console line.
        """
        names = timer_names(level)
        local = timers.local_seconds(names, reset=console) if names else []
        wanted: list[float] = []
        if sinks:
            wanted += [
                _difference(now, self._seen_s.get(name, 0.0))
                for name, now in zip(names, local, strict=True)
            ]
        if console:
            wanted += local
        sink_iterations = iterations - self._seen_iterations
        if sinks:
            self._seen_s, self._seen_iterations = dict(zip(names, local, strict=True)), iterations
        if console:  # the timers restart at zero, so what was seen of them becomes negative
            self._seen_s = {
                name: self._seen_s.get(name, 0.0) - now
                for name, now in zip(names, local, strict=True)
            }
            self._seen_iterations -= iterations
        rows = gather_seconds(wanted) if wanted else None
        return IntervalTimes(
            names,
            of_sinks=rows[:, : len(names)] if sinks and rows is not None else None,
            of_console=rows[:, -len(names) :] if console and rows is not None else None,
            sink_iterations=sink_iterations if sink_iterations > 0 else iterations,
        )


def _difference(now: float, seen: float) -> float:
    return now - seen if now >= seen else now  # smaller: somebody else has reset the timer


def write_foreign_timers(timers: Any, level: int, global_state: Any, iterations: int) -> None:
    """Have a timers object of another library write to the trackers' clients itself.

    All ranks call it: such an object gathers over the ranks in each call. Its timers start again
    from zero with the last call.
    """
    names = list(timer_names(level))
    step = global_state.train_state.step
    further = [
        (getattr(timers, method), getattr(global_state, client, None))
        for method, client in _FOREIGN_WRITERS
        if callable(getattr(timers, method, None))
    ]
    writer = getattr(global_state, "tensorboard_logger", None)
    timers.write(names, writer, step, normalizer=iterations, reset=not further)
    for index, (write, client) in enumerate(further):
        write(names, client, step, normalizer=iterations, reset=index == len(further) - 1)
