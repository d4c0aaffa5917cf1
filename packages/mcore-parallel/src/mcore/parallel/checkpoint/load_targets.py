"""Tensors that a load fills, and whether what the checkpoint holds fits into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorStorageMetadata,
)

from mcore.parallel.checkpoint.dtensor_shards import boxed
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor

__all__ = ["Target", "changes_dtype", "hole_problem", "target_of", "tensor_problem"]


@dataclass(frozen=True)
class Target:
    """A box of a global tensor that is read into memory of this rank.

    Attributes:
        tensor: Where to, detached, prepended axes first.
        global_shape: Shape of the whole tensor on this side.
        offset: Where the box starts in it.
        shape: Shape of the box.
        allow_shape_mismatch: Whether the checkpoint may have another global shape.
    """

    tensor: torch.Tensor
    global_shape: Shape
    offset: Shape
    shape: Shape
    allow_shape_mismatch: bool

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in the terms of torch.distributed.checkpoint."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.shape))


def target_of(shard: ShardedTensor) -> tuple[torch.Tensor, Target]:
    """Return the tensor that a load gives back for a shard, and the target inside it.

    A shard without data gets a new tensor on the CPU; the shard itself stays as it is.

    Raises:
        CheckpointingException: The data is on the meta device.
    """
    data = shard.data
    if data is None:
        data = torch.empty(shard.local_shape, dtype=shard.dtype)
    if data.is_meta:
        raise CheckpointingException(
            f"key {shard.key!r} is on the meta device: materialise it before the load, with "
            "module.to_empty(device=...) for instance"
        )
    inside = Target(
        boxed(data, shard.prepend_axis_num),
        shard.global_shape,
        shard.global_offset,
        shard.box_shape,
        shard.allow_shape_mismatch,
    )
    return data, inside


def tensor_problem(
    key: str, saved: TensorStorageMetadata | BytesStorageMetadata, target: Target
) -> str | None:
    """Say why a tensor of the checkpoint cannot be read into a target, or None."""
    if not isinstance(saved, TensorStorageMetadata):
        return f"key {key!r}: the checkpoint has an object, not a tensor"
    found, wanted = saved.properties.dtype, target.tensor.dtype
    if found != wanted and not (found.is_floating_point and wanted.is_floating_point):
        return f"key {key!r}: the checkpoint has dtype {found}, expected {wanted}"
    shape = tuple(saved.size)
    if shape == target.global_shape:
        return None
    if len(shape) != len(target.global_shape) or not target.allow_shape_mismatch:
        return (
            f"key {key!r}: the checkpoint has global shape {shape}, expected "
            f"{target.global_shape}"
            + (
                "; allow_shape_mismatch=True reads what overlaps and zeroes the rest"
                * (len(shape) == len(target.global_shape))
            )
        )
    return None


def hole_problem(key: str, target: Target, elements: int) -> str:
    """Say that the checkpoint does not have each element of a target exactly once."""
    return (
        f"key {key!r}: the checkpoint has {elements} of the {target.tensor.numel()} elements at "
        f"offset {target.offset} shape {target.shape}; it was not saved whole"
    )


def changes_dtype(saved: TensorStorageMetadata, target: Target) -> bool:
    """Say whether reading casts."""
    return saved.properties.dtype != target.tensor.dtype
