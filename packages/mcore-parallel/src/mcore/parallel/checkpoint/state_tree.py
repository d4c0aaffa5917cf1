"""Nested state dicts as named leaves, and leaves as nested state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import LocalNonpersistentObject, ShardedObject
from mcore.parallel.checkpoint.ranks import shard_of_dtensor
from mcore.parallel.checkpoint.sharded import ShardedBase, ShardedTensor
from mcore.tensor.dtensor import is_dtensor

Path = tuple[Any, ...]
_BARE_MARKER = "is_bare_tensor"
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
    for path, value in _iterate_leaves((), state_dict):
        name = dotted(path)
        if isinstance(value, ShardedTensor):
            value.validate_metadata_integrity()
            entries.tensors.append((path, value))
        elif isinstance(value, ShardedObject):
            entries.objects.append((path, value))
        elif isinstance(value, LocalNonpersistentObject):
            entries.local.append((path, value.unwrap()))
        elif is_dtensor(value):
            entries.tensors.append((path, bare_shard(value, name)))
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
        elif isinstance(value, OneLeaf):
            entries.common[name] = (path, value.value)
            if value.merge is not None:
                entries.merged[name] = value
            elif value.role is not Role.FIRST:
                entries.roles[name] = value.role
        else:
            entries.common[name] = (path, value)
    entries.tensors.sort(key=lambda item: (item[1].key, item[1].global_offset, dotted(item[0])))
    entries.objects.sort(key=lambda item: (item[1].unique_key, dotted(item[0])))
    return replace(entries, common=dict(sorted(entries.common.items())))


def bare_shard(tensor: torch.Tensor, key: str) -> ShardedTensor:
    """Describe a tensor that several ranks may hold as equal replicas, one of which is written."""
    if is_dtensor(tensor):
        shard = shard_of_dtensor(tensor, key)
    else:
        shard = ShardedTensor.from_rank_offsets(key, tensor)
    setattr(shard, _BARE_MARKER, True)
    return shard


def is_bare(shard: ShardedTensor) -> bool:
    """Return whether :func:`bare_shard` made a shard: its replicas are unknown."""
    return hasattr(shard, _BARE_MARKER)


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
    return isinstance(node, tuple) and _has_sharded(node)


def _has_sharded(node: Any) -> bool:
    if isinstance(node, tuple | list):
        return any(map(_has_sharded, node))
    if isinstance(node, Mapping):
        return any(map(_has_sharded, node.values()))
    return isinstance(node, ShardedBase | LocalNonpersistentObject)


def _is_of_megatron(value: Any) -> bool:
    """Return whether a value, or the first item of a list, is a sharded entry of Megatron-LM."""
    if isinstance(value, list | tuple):
        return bool(value) and _is_of_megatron(value[0])
    return type(value).__module__ == "megatron.core.dist_checkpointing.mapping"


def dotted(path: Path) -> str:
    """Return the name of a leaf: the parts of its path, joined by dots."""
    return ".".join(map(str, path))


def named_paths(entries: Entries) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each leaf with a path of text and numbers, text first."""
    named = [(shard.key, path) for path, shard in entries.tensors]
    named += [(one.unique_key, path) for path, one in entries.objects]
    named += [(name, path) for name, (path, _) in entries.common.items()]
    for name, path in named:
        if type(path[0]) is str and set(map(type, path)) <= {str, int}:
            yield name, path


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
