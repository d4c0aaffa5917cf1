"""How many microbatches and samples a step has."""

from __future__ import annotations

import sys
from typing import Any

from mcore.observe.host_reads import as_number

__all__ = ["find_num_microbatches", "samples_per_step"]

_CALCULATOR = "megatron.core.num_microbatches_calculator"


def find_num_microbatches(config: Any, global_state: Any = None) -> int:
    """Find the number of forward passes of one step on one data-parallel rank.

    The first that gives a number: ``global_state.get_num_microbatches()``;
    ``config.train.num_microbatches``; Megatron-LM's calculator, if the program has loaded it; the
    global batch size over micro batch size times data-parallel ranks; 1. No communication.

    Args:
        config: Something with ``train`` and ``data_parallel_size``, as
            :class:`mcore.observe.ConfigContainer`.
        global_state: Something with ``get_num_microbatches``, or None.

    Returns:
        The number, 1 or more.

    Example:
        >>> from mcore.observe import ConfigContainer, TrainingConfig
        >>> train = TrainingConfig(micro_batch_size=2, global_batch_size=64)
        >>> find_num_microbatches(ConfigContainer(train=train, data_parallel_size=4))
        8
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
    return max(int(total // (micro * _data_parallel_size(config))), 1)


def samples_per_step(config: Any, num_microbatches: int) -> int:
    """Return micro batch size times data-parallel ranks times microbatches.

    Args:
        config: Something with ``train.micro_batch_size`` and ``data_parallel_size``.
        num_microbatches: As found by :func:`find_num_microbatches`.

    Returns:
        Samples of one step over the whole job.

    Example:
        >>> from mcore.observe import ConfigContainer, TrainingConfig
        >>> config = ConfigContainer(train=TrainingConfig(micro_batch_size=2))
        >>> samples_per_step(config, num_microbatches=8)
        16
    """
    micro_batch_size = int(config.train.micro_batch_size)
    return micro_batch_size * _data_parallel_size(config) * num_microbatches


def _data_parallel_size(config: Any) -> int:
    for holder in (config, getattr(config, "train", None)):
        size = as_number(getattr(holder, "data_parallel_size", None))
        if size:
            return int(size)
    return 1


def _called(holder: Any) -> float | int | None:
    count = getattr(holder, "get_num_microbatches", None)
    if not callable(count):
        return None
    try:
        return as_number(count())
    except (AttributeError, RuntimeError):  # a calculator that nobody has set up
        return None
