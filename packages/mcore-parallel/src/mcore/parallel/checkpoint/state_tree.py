"""Nested state dicts as named leaves, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore.parallel.checkpoint.dtensor import shard_of_dtensor
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import LocalNonpersistentObject, ShardedObject
from mcore.parallel.checkpoint.sharded import ShardedBase, ShardedTensor
from mcore.tensor.dtensor import is_dtensor

Path = tuple[Any, ...]
_BARE_MARKER = "is_bare_tensor"
_ATOMS = (torch.Tensor, ShardedBase, LocalNonpersistentObject)


@dataclass(frozen=True)
class OneLeaf:
    """A value that is saved and loaded as one leaf, whatever containers it consists of."""

    value: Any = None


@dataclass(frozen=True)
class Entries:
    """The leaves of a state dict by kind, each kind in an order that all ranks share."""

    tensors: list[tuple[Path, ShardedTensor]]  # by key and offset
    objects: list[tuple[Path, ShardedObject]]  # by unique key
    common: dict[str, tuple[Path, Any]]  # what every rank holds alike, by dotted name
    local: list[tuple[Path, Any]]  # never saved
    own_common: frozenset[str] | None = None  # those that this rank writes; None: not chosen yet

    def written_common(self, *, is_first: bool) -> dict[str, Any]:
        """Return the common leaves that this rank writes: where not chosen, the first has all."""
        if self.own_common is not None:
            return {name: self.common[name][1] for name in sorted(self.own_common)}
        return {name: value for name, (_, value) in self.common.items()} if is_first else {}


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> Entries:
    """Sort the leaves of a nested state dict by kind; a bare DTensor is a shard, named by its path.

    Names of common leaves are keys and list places, joined by dots, as torch joins them.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointingException(
            f"a state dict must be a dict, got {type(state_dict).__name__}"
        )
    entries = Entries([], [], {}, [])
    for path, value in _leaves((), state_dict):
        _add(entries, path, value)
    entries.tensors.sort(key=lambda item: (item[1].key, item[1].global_offset, dotted(item[0])))
    entries.objects.sort(key=lambda item: (item[1].unique_key, dotted(item[0])))
    common = dict(sorted(entries.common.items()))
    return Entries(entries.tensors, entries.objects, common, entries.local)


def _add(entries: Entries, path: Path, value: Any) -> None:
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
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        raise CheckpointingException(
            f"{name!r} is a {type(value).__name__}; put what its state_dict() returns there"
        )
    elif name in entries.common:
        raise CheckpointingException(
            f"two leaves of the state dict have the name {name!r}; rename one of them"
        )
    else:
        entries.common[name] = (path, value.value if isinstance(value, OneLeaf) else value)


def bare_shard(tensor: torch.Tensor, key: str) -> ShardedTensor:
    """Describe a tensor of which several ranks may hold equal copies; one of them is written."""
    if is_dtensor(tensor):
        shard = shard_of_dtensor(tensor, key)
    else:
        shard = ShardedTensor.from_rank_offsets(key, tensor)
    setattr(shard, _BARE_MARKER, True)
    return shard


def is_bare(shard: ShardedTensor) -> bool:
    """Return whether a shard is that of a tensor that nothing says more about."""
    return hasattr(shard, _BARE_MARKER)


def _leaves(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    if not _is_entered(node):
        yield path, node
        return
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        yield from _leaves((*path, key), value)


def _is_entered(node: Any) -> bool:
    """Return whether a node is a dict, a list with a dict or tensor, a tuple with a shard."""
    if isinstance(node, Mapping):
        return True
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


def dotted(path: Path) -> str:
    """Return the name of a leaf that has no other."""
    return ".".join(map(str, path))


def named_paths(entries: Entries) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each leaf, where the path is of text and numbers, text first."""
    named = [(shard.key, path) for path, shard in entries.tensors]
    named += [(one.unique_key, path) for path, one in entries.objects]
    named += [(name, path) for name, (path, _) in entries.common.items()]
    for name, path in named:
        if type(path[0]) is str and set(map(type, path)) <= {str, int}:
            yield name, path


def rebuild_state_dict(state_dict: Mapping[Any, Any], values: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return new containers of the same structure; leaves without a path in ``values`` stay."""
    rebuilt: dict[Any, Any] = _rebuilt((), state_dict, values)
    return rebuilt


def _rebuilt(path: Path, node: Any, values: Mapping[Path, Any]) -> Any:
    if not _is_entered(node):
        return values.get(path, node)
    if isinstance(node, Mapping):
        return {key: _rebuilt((*path, key), value, values) for key, value in node.items()}
    items = [_rebuilt((*path, place), value, values) for place, value in enumerate(node)]
    if isinstance(node, list):
        return items
    return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
