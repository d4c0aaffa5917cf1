"""Which box of the global tensor a DTensor's local shard is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.torch_compat import dtensor_chunk, split_factor
from mcore.tensor.dtensor import to_local_if_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["DTensorShard", "boxed", "describe_dtensor", "replica_index"]


@dataclass(frozen=True)
class DTensorShard:
    """A rank's part of a DTensor.

    Attributes:
        local_shape: Shape of the local shard.
        global_shape: Shape of the DTensor.
        global_offset: Where the shard starts in it.
        axis_fragmentations: Parts per axis, None when they are uneven; the same on all ranks.
        replica_index: 0 for one copy of each part, then counting over the replicated mesh
            dimensions.
    """

    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_index: int


def boxed(tensor: torch.Tensor, prepend_axis_num: int) -> torch.Tensor:
    """View the local part, detached, with a leading axis of size 1 for each prepended axis."""
    return to_local_if_dtensor(tensor).detach()[(None,) * prepend_axis_num + (...,)]


def describe_dtensor(key: str, tensor: DTensor) -> DTensorShard:
    """Read offset, sizes and replica number from a DTensor's mesh and placements.

    No communication.

    Args:
        key: Name in the checkpoint, for the error text.
        tensor: A DTensor with shards and replicas only.

    Returns:
        The description of this rank's part.

    Raises:
        CheckpointingException: Pending partial sums, a rank outside the mesh, or a strided shard
            that is not one box.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointingException(
            f"key {key!r}: the DTensor has partial sums {tensor.placements}; redistribute it to "
            "Shard or Replicate placements first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        raise CheckpointingException(
            f"key {key!r}: this rank is outside the DTensor's mesh and holds no part of it; leave "
            "the key out of this rank's state dict"
        )
    _reject_scattered_shard(key, tensor)
    offset, shape = dtensor_chunk(tensor)
    return DTensorShard(
        local_shape=shape,
        global_shape=tuple(tensor.shape),
        global_offset=offset,
        axis_fragmentations=_even_parts(tensor),
        replica_index=replica_index(tensor),
    )


def _shards_by_axis(tensor: DTensor) -> dict[int, list[int]]:
    """List, per tensor axis that is cut, the mesh dimensions that cut it."""
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(tensor.placements):
        axis = getattr(placement, "dim", None)
        if axis is not None:
            cuts.setdefault(axis % tensor.ndim, []).append(mesh_dim)
    return cuts


def _sizes(mesh: DeviceMesh, mesh_dims: list[int]) -> int:
    return math.prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)


def _reject_scattered_shard(key: str, tensor: DTensor) -> None:
    """A strided shard is one box only where later mesh dimensions use up its split factor."""
    for mesh_dims in _shards_by_axis(tensor).values():
        for mesh_dim in mesh_dims:
            factor = split_factor(tensor.placements[mesh_dim])
            later = [other for other in mesh_dims if other > mesh_dim]
            if factor is not None and factor != _sizes(tensor.device_mesh, later):
                raise CheckpointingException(
                    f"key {key!r}: the local shard of placements {tensor.placements} is scattered "
                    "over the global tensor and no single box; redistribute it first"
                )


def _even_parts(tensor: DTensor) -> tuple[int, ...] | None:
    parts = [1] * tensor.ndim
    for axis, mesh_dims in _shards_by_axis(tensor).items():
        parts[axis] = _sizes(tensor.device_mesh, mesh_dims)
        if tensor.shape[axis] % parts[axis]:
            return None
    return tuple(parts)


def replica_index(tensor: DTensor) -> int:
    """Number the copies of a part: row-major over the mesh dimensions that do not cut.

    No communication. 0 on ranks outside the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate() or [0] * len(tensor.placements)
    number = 0
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * tensor.device_mesh.size(mesh_dim) + coordinate[mesh_dim]
    return number
