"""A step as the training log sees it: what it needs to know, and the values it is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore.observe.model_groups import find_process_groups
from mcore.observe.sinks.scalars import as_number
from mcore.parallel.groups import get_pg_size, world_size
from mcore.versioning.process_rank import process_world_size

_CALCULATOR = "megatron.core.num_microbatches_calculator"


@dataclass(frozen=True)
class LogStep:
    """A step, the same on every rank, with the containers of the run."""

    config: Any
    global_state: Any
    iteration: int
    num_microbatches: int
    skipped: bool
    ends_sink_interval: bool
    ends_console_interval: bool
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
        steps: int = 1,
    ) -> LogStep:
        """Look the step up in the configuration and the state."""
        iteration = int(global_state.train_state.step)
        groups = find_process_groups(pg_collection, model)
        if seq_length is None:
            seq_length = getattr(getattr(config, "dataset", None), "seq_length", None)
        length = as_number(seq_length)
        sink_interval = getattr(config.logger, "tensorboard_log_interval", 1)
        return cls(
            config=config,
            global_state=global_state,
            iteration=iteration,
            num_microbatches=find_num_microbatches(config, global_state, groups),
            skipped=bool(skipped_iter),
            ends_sink_interval=_ends(sink_interval, iteration, steps),
            ends_console_interval=_ends(config.logger.log_interval, iteration, steps),
            loaded_iteration=loaded_iteration,
            world_size=world_size(),
            seq_length=None if length is None else int(length),
            pg_collection=groups,
        )

    @property
    def logs(self) -> bool:
        """Whether anything is logged at this step."""
        return self.ends_sink_interval or self.ends_console_interval

    @property
    def train_iters(self) -> int | None:
        """Steps of the whole run."""
        number = as_number(getattr(self.config.train, "train_iters", None))
        return None if number is None else int(number)

    @property
    def model_config(self) -> Any:
        """The model's configuration, or None."""
        return getattr(self.config, "model", None)

    def group(self, name: str) -> Any:
        """Return a group that has more than one rank, else None."""
        group = getattr(self.pg_collection, name, None)
        return group if get_pg_size(group) > 1 else None


@dataclass(frozen=True)
class StepValues:
    """What the training loop hands over for a step: numbers, tensors of one element, or None."""

    losses: Mapping[str, Any]
    learning_rate: Any
    decoupled_learning_rate: Any
    loss_scale: Any
    grad_norm: Any
    params_norm: Any
    num_zeros: Any
    max_attention_logit: Any
    batch_size: int


def is_on(settings: Any, name: str) -> bool:
    """Return whether a switch is on; what is missing, or neither bool nor int, is off.

    :func:`mcore.modules.config.is_switched_on` takes any object for "on", so that a mock of a
    configuration would switch everything on.
    """
    value = getattr(settings, name, False)
    return isinstance(value, int) and bool(value)


def find_num_microbatches(config: Any, global_state: Any = None, pg_collection: Any = None) -> int:
    """Return the number of forward passes of one step on one data-parallel rank, at least 1.

    It comes from the state, else the configuration, else Megatron-LM's calculator if it is loaded.
    """
    train = getattr(config, "train", None)
    for found in (
        _called(global_state),
        as_number(getattr(train, "num_microbatches", None)),
        _called(sys.modules.get(_CALCULATOR)),
    ):
        if found is not None:
            return max(int(found), 1)
    total = as_number(getattr(train, "global_batch_size", None))
    micro = as_number(getattr(train, "micro_batch_size", None))
    if not total or not micro:
        return 1
    return max(int(total // (micro * data_parallel_size(config, pg_collection))), 1)


def samples_per_step(config: Any, num_microbatches: int, pg_collection: Any = None) -> int:
    """Return micro batch size times data-parallel ranks times microbatches."""
    micro_batch_size = int(config.train.micro_batch_size)
    return micro_batch_size * data_parallel_size(config, pg_collection) * num_microbatches


def _ends(interval: Any, iteration: int, steps: int) -> bool:
    """Return whether one of the last steps ended an interval."""
    every = as_number(interval)
    if every is None or every < 1:
        raise ValueError(f"a logging interval is {interval!r}; give 1 step or more")
    return iteration // int(every) > (iteration - steps) // int(every)


def data_parallel_size(config: Any, pg_collection: Any = None) -> int:
    """Return the number of data-parallel ranks: as configured, else the size of ``dp``.

    Without groups every rank of the job counts.
    """
    for holder in (config, getattr(config, "train", None)):
        size = as_number(getattr(holder, "data_parallel_size", None))
        if size:
            return int(size)
    if pg_collection is None:
        return process_world_size()
    return get_pg_size(getattr(pg_collection, "dp", None))


def _called(holder: Any) -> float | int | None:
    count = getattr(holder, "get_num_microbatches", None)
    if not callable(count):
        return None
    try:
        return as_number(count())
    except (AttributeError, RuntimeError):  # a calculator that nobody has set up
        return None
