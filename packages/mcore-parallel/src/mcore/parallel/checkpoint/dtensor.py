"""Shards of DTensors: the cuts of their placements, and cuts over ranks outside their mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.ranks import CheckpointRanks
from mcore.parallel.checkpoint.sharded import ReplicaId, ShardedTensor
from mcore.parallel.torch_compat import dtensor_chunk, split_factor
from mcore.tensor.dtensor import to_local_if_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_FSDP2_MARKER = "is_torch_fsdp2_param"
Offsets = Sequence[Sequence[int]]


def shard_of_dtensor(
    tensor: DTensor, key: str, replica_id: ReplicaId | None = None, **fields: Any
) -> ShardedTensor:
    """Describe a DTensor's local shard by its mesh and placements, marked as one of FSDP2."""
    _reject_unsavable(key, tensor)
    counts = [1] * tensor.ndim  # shards along each axis
    for axis, mesh_dims in _find_cuts(tensor).items():
        counts[axis] = _count_ranks(tensor.device_mesh, mesh_dims)
    # By the global shape, so that all ranks agree, also those with a whole shard.
    is_uneven = any(size % count for size, count in zip(tensor.shape, counts, strict=True))
    offset, shape = dtensor_chunk(tensor)
    shard = ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=shape,
        global_shape=tuple(tensor.shape),
        global_offset=offset,
        axis_fragmentations=None if is_uneven else tuple(counts),
        replica_id=(0, 0, replica_index(tensor)) if replica_id is None else replica_id,
        **fields,
    )
    setattr(shard, _FSDP2_MARKER, True)
    return shard


def replace_fields(shard: ShardedTensor, **fields: Any) -> ShardedTensor:
    """Replace fields of a DTensor's shard. ``dataclasses.replace`` drops the marker."""
    changed = replace(shard, **fields)
    setattr(changed, _FSDP2_MARKER, True)
    return changed


def cut_over_tensor_parallel(
    shard: ShardedTensor, axis: int, ranks: CheckpointRanks
) -> ShardedTensor:
    """Turn the global tensor of a shard into one of ``tp_size`` equal slices along ``axis``."""
    size = shard.global_shape[axis]
    shape, offset = list(shard.global_shape), list(shard.global_offset)
    shape[axis] = size * ranks.tp_size
    offset[axis] += size * ranks.tp_rank
    counts = None
    if shard.axis_fragmentations is not None:
        counts = list(shard.axis_fragmentations)
        counts[axis] *= ranks.tp_size
    return replace_fields(
        shard, global_shape=shape, global_offset=offset, axis_fragmentations=counts
    )


def prepend_axes(shard: ShardedTensor, prepend_offsets: Offsets) -> ShardedTensor:
    """Put stacked axes before the axes of a shard without any."""
    if not prepend_offsets:
        return shard
    stack = ShardedTensor.from_rank_offsets(
        shard.key,
        torch.empty((), device="cpu"),
        *prepend_offsets,
        prepend_axis_num=len(prepend_offsets),
    )
    counts = None
    if shard.axis_fragmentations is not None:
        counts = stack.global_shape + shard.axis_fragmentations
    return replace_fields(
        shard,
        global_shape=stack.global_shape + shard.global_shape,
        global_offset=stack.global_offset + shard.global_offset,
        axis_fragmentations=counts,
        prepend_axis_num=len(prepend_offsets),
    )


def with_leading_axes(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """View a local tensor, detached, with ``count`` leading axes of size 1."""
    local = to_local_if_dtensor(tensor).detach()
    return local[(None,) * count + (...,)] if count else local


def replica_index(tensor: DTensor) -> int:
    """Return the number of this replica of a shard, row-major over the replicating mesh dimensions.

    0 on ranks outside the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate() or [0] * len(tensor.placements)
    number = 0
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * tensor.device_mesh.size(mesh_dim) + coordinate[mesh_dim]
    return number


def _reject_unsavable(key: str, tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointingException(
            f"key {key!r}: the DTensor has partial sums {tensor.placements}. Redistribute it to "
            "Shard or Replicate placements first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        raise CheckpointingException(
            f"key {key!r}: this rank is outside the DTensor's mesh and has no shard of it. Leave "
            "the key out of this rank's state dict"
        )
    # FSDP2 over tensor parallelism cuts in the opposite order of the mesh and marks its shards as
    # strided. Such a shard is a box only if the later mesh dimensions make up its split factor.
    for mesh_dims in _find_cuts(tensor).values():
        for mesh_dim in mesh_dims:
            factor = split_factor(tensor.placements[mesh_dim])
            later = [other for other in mesh_dims if other > mesh_dim]
            if factor is not None and factor != _count_ranks(tensor.device_mesh, later):
                raise CheckpointingException(
                    f"key {key!r}: the local shard of placements {tensor.placements} is scattered "
                    "over the global tensor and not a single box. Redistribute it first"
                )


def _find_cuts(tensor: DTensor) -> dict[int, list[int]]:
    """List, per tensor axis that is cut, the mesh dimensions that cut it."""
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(tensor.placements):
        axis = getattr(placement, "dim", None)
        if axis is not None:
            cuts.setdefault(axis % tensor.ndim, []).append(mesh_dim)
    return cuts


def _count_ranks(mesh: DeviceMesh, mesh_dims: list[int]) -> int:
    return math.prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
