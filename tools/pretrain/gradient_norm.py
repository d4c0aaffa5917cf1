"""The norm of a gradient that is spread over ranks, and gradients scaled down to a limit of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from mcore.parallel.groups import get_pg_size
from mcore.parallel.tensor_parallel import param_is_not_tensor_parallel_duplicate
from mcore.tensor import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)


def clip_to_norm(
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]],
    limit: float,
    *,
    tp_group: dist.ProcessGroup | None,
    shard_groups: Iterable[dist.ProcessGroup | None] = (),
) -> torch.Tensor:
    """Scale gradients in place to a global norm of at most ``limit``; 0 only measures.

    One all-reduce over each of ``shard_groups`` and one over ``tp``; all ranks of them call it.

    Args:
        gradients: this rank's parameters, each with its gradient; at least one.
        limit: the largest norm that is left as it is.
        tp_group: ranks whose slices add up to whole parameters; copies over it count once.
        shard_groups: further groups over which parts add up.

    Returns:
        The norm before scaling, 0-d, equal on all ranks of the groups.
    """
    every = [gradient for _, gradient in gradients]
    counted = [
        gradient
        for parameter, gradient in gradients
        if param_is_not_tensor_parallel_duplicate(parameter, tp_group=tp_group)
    ]
    flag = torch.zeros(1, dtype=torch.int, device=every[0].device)
    norm, _ = local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [counted], False)
    square = norm.square()
    for group in (*shard_groups, tp_group):
        if get_pg_size(group) > 1:
            dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if limit > 0:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        local_multi_tensor_applier(local_multi_tensor_scale, flag, [every, every], scale)
    total: torch.Tensor = norm[0]
    return total
