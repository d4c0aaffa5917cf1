"""Times of the training step's phases, for trackers and for the console, from one collective.

Trackers and console look at timers at different intervals. The timers run on from one console
line to the next; what trackers get is the difference to their last tick.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore.observe.timers import Timers, gather_seconds
from mcore.observe.timers.text import longest_times

__all__ = ["TickTimes", "TimerTicks", "timer_names", "write_foreign_timers"]

logger = logging.getLogger(__name__)

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
    """List the timers that the training log shows.

    Args:
        level: The timers' level of detail, -1 to 2.

    Returns:
        None of them below 1, the phases of a step at 1, also those of a pipeline at 2.

    Example:
        >>> timer_names(0), timer_names(1)[0], len(timer_names(2))
        ((), 'forward-backward', 24)
    """
    return _LEVEL_1 * (level >= 1) + _LEVEL_2 * (level >= 2)


@dataclass(frozen=True)
class TickTimes:
    """Times of all ranks for one step that logs, still on the device of the collective.

    Attributes:
        names: Names of the timers.
        since_tick: Seconds since the trackers' last tick, ``[world_size, len(names)]``.
        since_line: Seconds since the last console line, likewise.
        tick_iterations: Steps since the trackers' last tick.
    """

    names: tuple[str, ...]
    since_tick: torch.Tensor | None
    since_line: torch.Tensor | None
    tick_iterations: int

    def longest(self) -> dict[str, float]:
        """Return ``{name}-time`` in seconds per step for the trackers; copies to the host."""
        if self.since_tick is None:
            return {}
        return longest_times(self.names, self.since_tick.tolist(), self.tick_iterations)


@dataclass
class TimerTicks:
    """Remembers how far the trackers have seen the timers.

    Attributes:
        seen_s: Seconds of each timer at the last tick, relative to its last reset.
        seen_iterations: Steps since the last console line at the last tick, likewise.
    """

    seen_s: dict[str, float] = field(default_factory=dict)
    seen_iterations: int = 0

    def gather(
        self, timers: Timers, level: int, iterations: int, *, tick: bool, line: bool
    ) -> TickTimes:
        """Read the timers of all ranks for the trackers, the console, or both.

        One all-gather of float32 over the world group, none when no timer is shown; all ranks
        call it with the same arguments and get the result.

        Args:
            timers: The timers.
            level: Their level of detail.
            iterations: Steps since the last console line.
            tick: The trackers want times now.
            line: A console line comes now: the timers start again from zero.

        Returns:
            The times.
        """
        names = timer_names(level)
        local = timers.local_seconds(names, reset=line) if names else []
        since_tick = [
            _difference(now, self.seen_s.get(name, 0.0))
            for name, now in zip(names, local, strict=True)
        ]
        wanted = since_tick * tick + local * line
        tick_iterations = iterations - self.seen_iterations
        self._advance(dict(zip(names, local, strict=True)), iterations, tick=tick, line=line)
        parts = _gather_parts(wanted, len(names), tick, line)
        return TickTimes(names, *parts, tick_iterations if tick_iterations > 0 else iterations)

    def _advance(
        self, seen: Mapping[str, float], iterations: int, *, tick: bool, line: bool
    ) -> None:
        if tick:
            self.seen_s, self.seen_iterations = dict(seen), iterations
        if line:  # the timers restart at zero: what was seen of them lies below it
            self.seen_s = {name: self.seen_s.get(name, 0.0) - now for name, now in seen.items()}
            self.seen_iterations -= iterations


def _difference(now: float, seen: float) -> float:
    return now - seen if now >= seen else now  # smaller: somebody else has reset the timer


def _gather_parts(
    wanted: Sequence[float], width: int, tick: bool, line: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not wanted:
        return None, None
    rows = gather_seconds(wanted)
    return rows[:, :width] if tick else None, rows[:, -width:] if line else None


def write_foreign_timers(timers: Any, level: int, global_state: Any, iterations: int) -> None:
    """Have a timers object of another library write to the trackers itself.

    All ranks call it: such an object gathers over the ranks in each call. Its timers start again
    from zero with the last call.

    Args:
        timers: Something with ``write`` and perhaps ``write_to_wandb`` and so on.
        level: The level of detail.
        global_state: Something with ``train_state.step`` and the trackers' clients.
        iterations: Steps that the times cover.
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
