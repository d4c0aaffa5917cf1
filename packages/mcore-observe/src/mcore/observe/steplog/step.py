"""What is known about a step that the training log looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore.observe.host_reads import as_number
from mcore.observe.model_groups import find_process_groups
from mcore.parallel.groups import get_pg_size, world_size

__all__ = ["LogStep", "is_on"]


def is_on(settings: Any, name: str) -> bool:
    """Say whether a switch is on; what is missing or no switch is off.

    Args:
        settings: Any object.
        name: The attribute, a bool or an int.

    Returns:
        Its truth.

    Example:
        >>> from types import SimpleNamespace
        >>> is_on(SimpleNamespace(log_throughput=True), "log_throughput"), is_on(None, "x")
        (True, False)
    """
    value = getattr(settings, name, False)
    return isinstance(value, int) and bool(value)


@dataclass(frozen=True)
class LogStep:
    """A step, the same on every rank.

    Attributes:
        iteration: Steps done.
        is_tick: Trackers get scalars now.
        is_line: The console gets a line now.
        skipped: The optimizer skipped the step.
        loaded_iteration: The step that the run resumed at.
        world_size: Ranks of the job.
        seq_length: Tokens of a sample, or None.
        pg_collection: The groups, or None.
    """

    iteration: int
    is_tick: bool
    is_line: bool
    skipped: bool
    loaded_iteration: int
    world_size: int
    seq_length: int | None
    pg_collection: Any

    @classmethod
    def of(
        cls,
        config: Any,
        global_state: Any,
        model: Any,
        *,
        skipped_iter: int,
        pg_collection: Any,
        loaded_iteration: int,
        seq_length: int | None,
    ) -> LogStep:
        """Look at the configuration and the state; see the class for the result."""
        iteration = int(global_state.train_state.step)
        if seq_length is None:
            seq_length = getattr(getattr(config, "dataset", None), "seq_length", None)
        length = as_number(seq_length)
        return cls(
            iteration=iteration,
            is_tick=_hits(iteration, getattr(config.logger, "tensorboard_log_interval", 1)),
            is_line=_hits(iteration, config.logger.log_interval),
            skipped=bool(skipped_iter),
            loaded_iteration=loaded_iteration,
            world_size=world_size(),
            seq_length=None if length is None else int(length),
            pg_collection=find_process_groups(pg_collection, model),
        )

    @property
    def logs(self) -> bool:
        """Whether anything is logged at this step."""
        return self.is_tick or self.is_line

    def group(self, name: str) -> Any:
        """Return a group that has more than one rank, else None."""
        group = getattr(self.pg_collection, name, None)
        return group if get_pg_size(group) > 1 else None


def _hits(iteration: int, interval: Any) -> bool:
    every = as_number(interval)
    if every is None or every < 1:
        raise ValueError(f"a logging interval is {interval!r}; give 1 step or more")
    return iteration % int(every) == 0
