"""Sums of several vectors over a process group, in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mcore.parallel.groups import GroupLike, as_process_group, comm_device, get_pg_size

__all__ = ["sum_over_group"]


def sum_over_group(vectors: Sequence[torch.Tensor], group: GroupLike | None) -> list[torch.Tensor]:
    """Sum vectors over a group, packed into one all-reduce.

    All ranks of the group call it with vectors of the same sizes and types, and get the result.
    No collective for a group of one rank, None, no vectors, or without torch.distributed.

    Args:
        vectors: 1-D tensors of one dtype and device.
        group: The group; None is one rank, not the world.

    Returns:
        The sums, in the same order, sizes and devices; the given tensors if nothing was summed.

    Example:
        >>> sum_over_group([torch.tensor([1.0, 2.0])], None)
        [tensor([1., 2.])]
    """
    if not vectors or get_pg_size(group) == 1:
        return list(vectors)
    packed = torch.cat(list(vectors)).to(comm_device(group))
    dist.all_reduce(packed, group=as_process_group(group))
    back = packed.to(vectors[0].device)
    return list(torch.split(back, [vector.numel() for vector in vectors]))
