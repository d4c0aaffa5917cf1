"""A step of training: the input of the log, and the facts that the log derives from it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from mcore.observe.norms import find_process_groups
from mcore.observe.rank_logging import writes_log
from mcore.observe.sinks.scalars import as_number, only_numbers
from mcore.parallel.groups import as_process_group, get_pg_size, world_size
from mcore.parallel.reductions import reduce_max_stat_across_model_parallel_group
from mcore.versioning.process_rank import process_rank, process_world_size

_CALCULATOR = "megatron.core.num_microbatches_calculator"
_NUMBERS = (
    "learning_rate",
    "decoupled_learning_rate",
    "loss_scale",
    "grad_norm",
    "params_norm",
    "num_zeros_in_grad",
    "log_max_attention_logit",
)


@dataclass
class StepInput:
    """A step, or several at once, as a training loop passes it to the log.

    Values are Python or NumPy numbers, tensors with one element, or None. The arguments of
    :func:`mcore.observe.training_log` have the same names.
    """

    losses: Mapping[str, Any]
    learning_rate: Any = None
    decoupled_learning_rate: Any = None
    loss_scale: Any = None
    grad_norm: Any = None
    params_norm: Any = None
    num_zeros_in_grad: Any = None
    log_max_attention_logit: Any = None
    skipped: bool = False
    steps: int = 1  # since the last call, with their average as losses
    samples: float | None = None  # of these steps over all ranks, if the loop counts them
    tokens: float | None = None  # of these steps over all ranks, if the loop counts them
    scalars: Mapping[str, Any] = field(default_factory=dict)  # for the trackers alone
    model: Any = None
    pg_collection: Any = None
    history_wct: Sequence[float] | None = None
    loaded_iteration: int = 0
    seq_length: int | None = None
    reduce: str = "last"  # of the losses over the ranks: "mean", "max" or "last"
    dp_group: Any = None  # the ranks of the reduction. None is the group dp, else all ranks


@dataclass
class LogStep:
    """The facts of a step, the same on every rank except for ``writes``.

    Facts that only steps with output need are found at their first access.
    """

    given: StepInput
    losses: Mapping[str, Any]  # the given losses that are numbers
    config: Any
    global_state: Any
    iteration: int
    pg_collection: Any
    ends_sink_interval: bool
    ends_console_interval: bool

    @classmethod
    def of(cls, given: StepInput, config: Any, global_state: Any) -> LogStep:
        """Look the step up in the configuration and the state."""
        iteration = int(global_state.train_state.step)
        sink_interval = getattr(config.logger, "tensorboard_log_interval", 1)
        losses = only_numbers(given.losses, warns=False)
        if len(losses) < len(given.losses):  # the rank is asked for only if something may be wrong
            only_numbers(given.losses, warns=writes_log(global_state))
        return cls(
            given=given,
            losses=losses,
            config=config,
            global_state=global_state,
            iteration=iteration,
            pg_collection=find_process_groups(given.pg_collection, given.model),
            ends_sink_interval=_ends_interval(sink_interval, iteration, given.steps),
            ends_console_interval=_ends_interval(
                config.logger.log_interval, iteration, given.steps
            ),
        )

    @functools.cached_property
    def writes(self) -> bool:
        """Whether this rank prints the line and warns of values that are not numbers."""
        return writes_log(self.global_state)

    @property
    def logs(self) -> bool:
        """Whether anything is logged at this step."""
        return self.ends_sink_interval or self.ends_console_interval

    @property
    def has_megatron_line(self) -> bool:
        """Whether the console line is Megatron-LM's, as for settings without a format."""
        return getattr(self.config.logger, "console_format", None) != "readable"

    @property
    def train_iters(self) -> int | None:
        """Steps of the whole run."""
        number = as_number(getattr(self.config.train, "train_iters", None))
        return None if number is None else int(number)

    @property
    def model_config(self) -> Any:
        """The model's configuration, or None."""
        return getattr(self.config, "model", None)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Forward passes of this step on one data-parallel rank."""
        return find_num_microbatches(self.config, self.global_state, self.pg_collection)

    @functools.cached_property
    def world_size(self) -> int:
        """Ranks of the job."""
        return world_size()

    @functools.cached_property
    def seq_length(self) -> int | None:
        """Tokens of a sample, or None."""
        length = self.given.seq_length
        if length is None:
            length = getattr(getattr(self.config, "dataset", None), "seq_length", None)
        number = as_number(length)
        return None if number is None else int(number)

    @functools.cached_property
    def batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return samples_per_step(self.config, self.num_microbatches, self.pg_collection)

    def group(self, name: str) -> Any:
        """Return a group that has more than one rank, else None."""
        group = getattr(self.pg_collection, name, None)
        return group if get_pg_size(group) > 1 else None

    def loss_ranks(self) -> Any:
        """Return an index of the global ranks over which this rank reduces losses."""
        group = self.given.dp_group
        if group is None and self.pg_collection is None:
            return slice(None)
        group = as_process_group(group or getattr(self.pg_collection, "dp", None))
        return [process_rank()] if group is None else dist.get_process_group_ranks(group)

    def reduce_values(self) -> StepInput:
        """Return the input with None for values that are not numbers, and the reduced rate.

        All ranks call it: the learning rate is the largest over ``mp``. The writing rank warns of
        each value that is not a number.
        """
        given = {name: getattr(self.given, name) for name in _NUMBERS}
        values: dict[str, Any] = dict.fromkeys(_NUMBERS)
        values |= only_numbers(given, warns=self.writes)
        group = self.group("mp")
        if group is not None:
            values["learning_rate"] = reduce_max_stat_across_model_parallel_group(
                values["learning_rate"], group
            )
        return replace(self.given, losses=self.losses, **values)


def is_on(settings: Any, name: str) -> bool:
    """Return whether a switch is on. A missing switch is off, as is one of another type.

    :func:`mcore.modules.config.is_switched_on` accepts any object as "on": a mock of a
    configuration would switch everything on.
    """
    value = getattr(settings, name, False)
    return isinstance(value, int) and bool(value)


def find_num_microbatches(config: Any, global_state: Any = None, pg_collection: Any = None) -> int:
    """Return the number of forward passes of one step on one data-parallel rank, at least 1.

    It is read from the state, else the configuration, else Megatron-LM's calculator if loaded.
    """
    train = getattr(config, "train", None)
    for found in (
        _call_calculator(global_state),
        as_number(getattr(train, "num_microbatches", None)),
        _call_calculator(sys.modules.get(_CALCULATOR)),
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


def _ends_interval(interval: Any, iteration: int, steps: int) -> bool:
    """Return whether one of the last steps ended an interval."""
    every = as_number(interval)
    if every is None or every < 1:
        raise ValueError(f"a logging interval is {interval!r}: give 1 step or more")
    return iteration // int(every) > (iteration - steps) // int(every)


def _call_calculator(holder: Any) -> float | int | None:
    count = getattr(holder, "get_num_microbatches", None)
    if not callable(count):
        return None
    try:
        return as_number(count())
    except (AttributeError, RuntimeError):  # Megatron-LM's calculator before its set-up
        return None
