"""Sequence parallelism: what lies between the split matrices, cut along the sequence over tp.

Gathering and reduce-scattering together send as much as the all-reduce that they replace, while
norms, residuals and dropout are computed once instead of on every rank (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from mcore.parallel.groups import get_pg_size
from mcore.parallel.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

_MARK = "sequence_parallel"


def enter_split_layers(
    hidden: torch.Tensor, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> torch.Tensor:
    """``[s / tp, b, h]`` or, without sequence parallelism, ``[s, b, h]`` to ``[s, b, h]``."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, group=tp_group)
    return copy_to_tensor_model_parallel_region(hidden, tp_group)


def leave_split_layers(
    partial: torch.Tensor, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> torch.Tensor:
    """Sum the ranks' ``[s, b, h]``; with sequence parallelism keep ``[s / tp, b, h]`` of that."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, tp_group)
    return reduce_from_tensor_model_parallel_region(partial, tp_group)


def mark_partial_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Say that each tp rank's gradient covers its slice of the sequence only."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def has_partial_gradient(parameter: torch.Tensor) -> bool:
    """Whether the gradient has to be summed over the tp ranks."""
    return bool(getattr(parameter, _MARK, False))


def sum_partial_gradients(
    gradients: list[torch.Tensor], tp_group: dist.ProcessGroup | None
) -> None:
    """Sum gradients over the tp group in place: one all-reduce, called by all its ranks or none."""
    if not gradients or get_pg_size(tp_group) == 1:
        return
    if len(gradients) == 1:
        dist.all_reduce(gradients[0], group=tp_group)
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=tp_group)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        gradients, [part.view_as(into) for part, into in zip(parts, gradients, strict=True)]
    )
