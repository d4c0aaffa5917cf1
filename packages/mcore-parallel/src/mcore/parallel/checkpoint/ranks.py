"""The place of this rank's shards: in process groups, and by the placements of DTensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.sharded import ReplicaId, ShardedTensor
from mcore.parallel.groups import (
    GroupLike,
    as_process_group,
    get_pg_size,
    group_ranks,
    world_size,
)
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.torch_compat import dtensor_chunk, is_distributed, split_factor
from mcore.tensor.dtensor import to_local_if_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FSDP2_MARKER = "is_torch_fsdp2_param"
Offsets = Sequence[Sequence[int]]


class UnknownGroupError(RuntimeError, ValueError):
    """A group is neither given nor implied. A guess could write tensors twice or not at all."""


class _OneRank:
    """A group of this rank alone. torch makes one only with communication."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "one rank"


ONE_RANK = _OneRank()


class CheckpointRanks(NamedTuple):
    """This rank's part of a parameter, and the number of its replica."""

    tp_group: GroupLike
    tp_size: int
    tp_rank: int
    dp_cp_rank: int

    @property
    def replica_id(self) -> tuple[int, int, int]:
        """The replica id of a tensor or object that every rank of both groups holds."""
        return (0, self.tp_rank, self.dp_cp_rank)


def resolve_ranks(
    tp_group: GroupLike | None, dp_cp_group: GroupLike | None, *, need_dp_cp: bool = True
) -> CheckpointRanks:
    """Return this rank's place in the groups of a single tensor, see :func:`resolve_groups`."""
    tp_group, dp_cp_group = resolve_groups(tp_group, dp_cp_group, need_dp_cp=need_dp_cp)
    tp_size, tp_rank = _get_size_and_rank(tp_group)
    return CheckpointRanks(tp_group, tp_size, tp_rank, _get_size_and_rank(dp_cp_group)[1])


def resolve_groups(
    tp_group: GroupLike | None,
    dp_cp_group: GroupLike | None,
    *,
    pp_group: GroupLike | None = None,
    model_sizes: tuple[int, int] | None = None,
    need_dp_cp: bool = True,
) -> tuple[GroupLike, GroupLike]:
    """Return both groups: the given one, else the default ProcessGroups', else size 1 if certain.

    ``model_sizes`` are the tp and pp sizes of a whole model. A size of 1 rules out a missing group.
    """
    default = get_default_process_groups() if tp_group is None or dp_cp_group is None else None
    if default is not None:
        tp_group = default.tp if tp_group is None else tp_group
        dp_cp_group = default.dp_cp if dp_cp_group is None else dp_cp_group
        pp_group = default.pp if pp_group is None else pp_group
    if tp_group is not None and dp_cp_group is not None:
        return tp_group, dp_cp_group
    world = world_size()
    # If the known groups fill the world, each unknown group can only have this rank in it.
    stages = model_sizes[1] if pp_group is None and model_sizes else get_pg_size(pp_group)
    model_ranks = get_pg_size(tp_group) * stages
    fills_world = world == 1 or model_ranks * get_pg_size(dp_cp_group) == world
    if tp_group is None:
        if not fills_world and (model_sizes is None or model_sizes[0] > 1):
            raise _report_unknown_group("tp_group", "tp", world)
        tp_group = ONE_RANK
    if dp_cp_group is not None or fills_world or not need_dp_cp:
        return tp_group, ONE_RANK if dp_cp_group is None else dp_cp_group
    if model_sizes is None or model_ranks > 1:
        raise _report_unknown_group("dp_cp_group", "dp_cp", world)
    return tp_group, cast("dist.ProcessGroup", dist.group.WORLD)


def _get_size_and_rank(group: GroupLike) -> tuple[int, int]:
    member = as_process_group(group)
    return (1, 0) if member is None else (member.size(), member.rank())


def _report_unknown_group(name: str, field: str, world: int) -> UnknownGroupError:
    return UnknownGroupError(
        f"{name} is not given, there is no default ProcessGroups with a {field} group, and the "
        f"known groups do not fill the world of {world} ranks: a tensor could be written twice or "
        f"not at all. Pass {name}=..., metadata[{name!r}] or a pg_collection with {field}, or call "
        "set_default_process_groups(ProcessGroups.from_sizes(...))"
    )


def mesh_spans_world(mesh: DeviceMesh) -> bool:
    """Return whether a mesh has all ranks, so its placements describe every parallelism."""
    return is_distributed() and mesh.size() == dist.get_world_size()


def mesh_has_group(mesh: DeviceMesh, group: GroupLike | None) -> bool:
    """Return whether a mesh has all ranks of a group, so its placements cover the group."""
    if mesh_spans_world(mesh) or "tp" in (mesh.mesh_dim_names or ()):
        return True
    member = as_process_group(group)
    if not isinstance(member, dist.ProcessGroup):
        return False
    return set(group_ranks(member)) <= set(mesh.mesh.flatten().tolist())


def ensure_metadata_has_dp_cp_group(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of ``metadata`` that has the key ``dp_cp_group``.

    The caller's dict does not change, so no process group gets into a saved configuration. No
    communication.

    Args:
        metadata: The ``metadata`` argument of ``sharded_state_dict`` calls, or None.

    Returns:
        A new dict. If the key was missing, its value is the default ProcessGroups' ``dp_cp``, or
        None, which the builders resolve.

    Raises:
        TypeError: ``metadata`` is not a mapping.

    Example:
        >>> ensure_metadata_has_dp_cp_group(None)
        {'dp_cp_group': None}
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict or None, got {type(metadata).__name__}")
    found = dict(metadata or {})
    if "dp_cp_group" not in found:
        default = get_default_process_groups()
        found["dp_cp_group"] = None if default is None else default.dp_cp
    return found


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
