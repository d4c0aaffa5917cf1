"""Nested state dicts as named leaves, also DTensors, and leaves as nested state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import LocalNonpersistentObject, ShardedObject
from mcore.parallel.checkpoint.sharded import ReplicaId, ShardedBase, ShardedTensor
from mcore.tensor.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Path = tuple[Any, ...]
MESH_SIZE = "size_of_bare_mesh"  # of the marker of a shard that ranks outside may hold too
_FSDP2_MARKER = "is_torch_fsdp2_param"
_ATOMS = (torch.Tensor, ShardedBase, LocalNonpersistentObject)


class Role(str, Enum):
    """How ranks with different values of a leaf are treated."""

    FIRST = "first"  # the value of the first rank is saved, with a warning
    MUST_AGREE = "must agree"
    PER_RANK = "per rank"  # each rank's value is saved
    LEFT_OUT = "left out"  # not saved, unless it is PER_RANK on another rank


@dataclass(frozen=True)
class OneLeaf:
    """A value that is saved and loaded as one leaf, also if it consists of containers."""

    value: Any = None
    role: Role = Role.FIRST
    merge: Callable[[list[Any]], Any] | None = None  # makes what is saved of all ranks' values


@dataclass(frozen=True)
class Entries:
    """The leaves of a state dict by kind, each kind in an order that is the same on all ranks."""

    tensors: list[tuple[Path, ShardedTensor]]  # by key and offset
    objects: list[tuple[Path, ShardedObject]]  # by unique key
    common: dict[str, tuple[Path, Any]]  # equal on all ranks, by dotted name
    local: list[tuple[Path, Any]]  # never saved
    roles: dict[str, Role] = field(default_factory=dict)  # of common leaves
    merged: dict[str, OneLeaf] = field(default_factory=dict)  # those made of all ranks' values


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> Entries:
    """Sort the leaves of a nested state dict by kind. A bare DTensor is a shard named by its path.

    The name of a common leaf joins dict keys and list indices by dots, as in torch's checkpoints.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointingException(
            f"a state dict must be a dict, got {type(state_dict).__name__}"
        )
    entries = Entries([], [], {}, [])
    leaves = list(_iterate_leaves((), state_dict))
    are_dtensors = [is_dtensor(value) for _, value in leaves]
    for (path, value), is_shard in zip(leaves, are_dtensors, strict=True):
        name = dotted(path)
        if isinstance(value, ShardedTensor):
            value.validate_metadata_integrity()
            entries.tensors.append((path, value))
        elif isinstance(value, ShardedObject):
            entries.objects.append((path, value))
        elif isinstance(value, LocalNonpersistentObject):
            entries.local.append((path, value.unwrap()))
        elif is_shard:
            entries.tensors.append((path, _bare_shard_of_dtensor(value, name)))
        elif _is_of_megatron(value):
            raise CheckpointingException(
                f"{name!r} has an entry of Megatron-LM's dist_checkpointing. Convert the state "
                "dict with mcore.modules.from_megatron_sharded_state_dict(...)"
            )
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            raise CheckpointingException(
                f"{name!r} is a {type(value).__name__}. Put the result of its state_dict() there"
            )
        elif name in entries.common:
            raise CheckpointingException(
                f"two leaves of the state dict have the name {name!r}. Rename one of them"
            )
        else:
            if isinstance(value, OneLeaf):
                if value.merge is not None:
                    entries.merged[name] = value
                elif value.role is not Role.FIRST:
                    entries.roles[name] = value.role
                value = value.value
            entries.common[name] = (path, value)
    entries.tensors.sort(key=lambda item: (item[1].key, item[1].global_offset, dotted(item[0])))
    entries.objects.sort(key=lambda item: (item[1].unique_key, dotted(item[0])))
    return replace(entries, common=dict(sorted(entries.common.items())))


def bare_shard(tensor: torch.Tensor, key: str) -> ShardedTensor:
    """Describe a tensor that several ranks may hold as equal replicas, one of which is written."""
    if is_dtensor(tensor):
        return _bare_shard_of_dtensor(tensor, key)
    shard = ShardedTensor.from_rank_offsets(key, tensor)
    setattr(shard, MESH_SIZE, 1)
    return shard


def _bare_shard_of_dtensor(tensor: DTensor, key: str) -> ShardedTensor:
    shard = shard_of_dtensor(tensor, key)
    setattr(shard, MESH_SIZE, tensor.device_mesh.size())
    return shard


def shard_of_dtensor(
    tensor: DTensor, key: str, replica_id: ReplicaId | None = None, **fields: Any
) -> ShardedTensor:
    """Describe a DTensor's local shard by its mesh and placements, marked as one of FSDP2."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointingException(
            f"key {key!r}: the DTensor has partial sums {placements}. Redistribute it to Shard or "
            "Replicate placements first"
        )
    if mesh.get_coordinate() is None:
        raise CheckpointingException(
            f"key {key!r}: this rank is outside the DTensor's mesh and has no shard of it. Leave "
            "the key out of this rank's state dict"
        )
    counts = [1] * tensor.ndim  # shards along each axis, by the later mesh dimensions
    for mesh_dim in reversed(range(len(placements))):
        axis = getattr(placements[mesh_dim], "dim", None)
        factor = getattr(placements[mesh_dim], "split_factor", None)
        if axis is None:
            continue
        # FSDP2 over tensor parallelism cuts in the opposite order of the mesh and marks its shards
        # as strided. Such a shard is a box only if the later dimensions make up its split factor.
        if factor is not None and factor != counts[axis]:
            raise CheckpointingException(
                f"key {key!r}: the local shard of placements {placements} is scattered over the "
                "global tensor and not a single box. Redistribute it first"
            )
        counts[axis] *= mesh.size(mesh_dim)
    # By the global shape, so that all ranks agree, also those with a whole shard.
    is_uneven = any(size % count for size, count in zip(tensor.shape, counts, strict=True))
    [chunk] = cast("Any", tensor).__create_chunk_list__()  # as torch's checkpoints cut it
    shard = ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=chunk.sizes,
        global_shape=tensor.shape,
        global_offset=chunk.offsets,
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


def _iterate_leaves(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    if not _is_entered(node):
        yield path, node
        return
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        yield from _iterate_leaves((*path, key), value)


def _is_entered(node: Any) -> bool:
    """Return whether a node is a dict, a list with a dict or tensor, or a tuple with a shard."""
    if isinstance(node, Mapping):
        return True
    # As in torch's checkpoints, a list or tuple of plain values is one value, not many leaves.
    if isinstance(node, list):
        return any(
            isinstance(item, _ATOMS) or (isinstance(item, Mapping | list) and _is_entered(item))
            for item in node
        )
    return isinstance(node, tuple) and contains(
        node, lambda leaf: isinstance(leaf, ShardedBase | LocalNonpersistentObject)
    )


def contains(node: Any, is_meant: Callable[[Any], bool]) -> bool:
    """Return whether a leaf in nested dicts and lists is meant."""
    if isinstance(node, Mapping):
        node = list(node.values())
    if isinstance(node, list | tuple):
        return any(contains(one, is_meant) for one in node)
    return is_meant(node)


def _is_of_megatron(value: Any) -> bool:
    """Return whether a value, or the first item of a list, is a sharded entry of Megatron-LM."""
    if isinstance(value, list | tuple):
        return bool(value) and _is_of_megatron(value[0])
    return type(value).__module__ == "megatron.core.dist_checkpointing.mapping"


def dotted(path: Path) -> str:
    """Return the name of a leaf: the parts of its path, joined by dots."""
    return ".".join(map(str, path))


def rebuild_state_dict(state_dict: Mapping[Any, Any], values: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return new containers of the same structure. Leaves without a path in ``values`` stay."""
    rebuilt: dict[Any, Any] = _rebuild((), state_dict, values)
    return rebuilt


def _rebuild(path: Path, node: Any, values: Mapping[Path, Any]) -> Any:
    if not _is_entered(node):
        return values.get(path, node)
    if isinstance(node, Mapping):
        return {key: _rebuild((*path, key), value, values) for key, value in node.items()}
    items = [_rebuild((*path, place), value, values) for place, value in enumerate(node)]
    if isinstance(node, list):
        return items
    return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
