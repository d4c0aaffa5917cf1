"""Sharded tensors of DTensors: their own cuts, composed with those that their mesh lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mcore.parallel.checkpoint.dtensor_shards import describe_dtensor
from mcore.parallel.checkpoint.ranks import CheckpointRanks
from mcore.parallel.checkpoint.sharded import ReplicaId, ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["cut_over_tensor_parallel", "prepend_axes", "shard_of_dtensor", "with_fields"]

_FSDP2_MARKER = "is_torch_fsdp2_param"
Offsets = Sequence[Sequence[int]]


def shard_of_dtensor(
    tensor: DTensor, key: str, replica_id: ReplicaId | None = None, **fields: Any
) -> ShardedTensor:
    """Describe a DTensor's local shard by its own mesh and placements.

    No communication.

    Args:
        tensor: The DTensor. It becomes ``data`` itself.
        key: Name in the checkpoint.
        replica_id: Number of this copy; None counts the copies along replicated mesh dimensions.
        fields: Further fields of the ShardedTensor.

    Returns:
        The description, marked with ``is_torch_fsdp2_param = True``.

    Raises:
        CheckpointingException: Partial sums, a rank outside the mesh, or a shard that is no box.
    """
    place = describe_dtensor(key, tensor)
    shard = ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=place.local_shape,
        global_shape=place.global_shape,
        global_offset=place.global_offset,
        axis_fragmentations=place.axis_fragmentations,
        replica_id=(0, 0, place.replica_index) if replica_id is None else replica_id,
        **fields,
    )
    setattr(shard, _FSDP2_MARKER, True)
    return shard


def with_fields(shard: ShardedTensor, **fields: Any) -> ShardedTensor:
    """Replace fields of a DTensor's shard and keep the marker."""
    changed = replace(shard, **fields)
    setattr(changed, _FSDP2_MARKER, True)
    return changed


def cut_over_tensor_parallel(
    shard: ShardedTensor, axis: int, ranks: CheckpointRanks
) -> ShardedTensor:
    """Make the whole described so far one of ``tp_size`` equal parts along ``axis``."""
    size = shard.global_shape[axis]
    shape, offset = list(shard.global_shape), list(shard.global_offset)
    shape[axis] = size * ranks.tp_size
    offset[axis] += size * ranks.tp_rank
    parts = None
    if shard.axis_fragmentations is not None:
        parts = list(shard.axis_fragmentations)
        parts[axis] *= ranks.tp_size
    return with_fields(
        shard,
        global_shape=tuple(shape),
        global_offset=tuple(offset),
        axis_fragmentations=None if parts is None else tuple(parts),
    )


def prepend_axes(shard: ShardedTensor, prepend_offsets: Offsets) -> ShardedTensor:
    """Put stacked axes before those of a shard that has none yet."""
    if not prepend_offsets:
        return shard
    stack = ShardedTensor.from_rank_offsets(
        shard.key, torch.empty(()), *prepend_offsets, prepend_axis_num=len(prepend_offsets)
    )
    parts = None
    if shard.axis_fragmentations is not None:
        parts = stack.global_shape + shard.axis_fragmentations
    return with_fields(
        shard,
        global_shape=stack.global_shape + shard.global_shape,
        global_offset=stack.global_offset + shard.global_offset,
        axis_fragmentations=parts,
        prepend_axis_num=len(prepend_offsets),
    )
