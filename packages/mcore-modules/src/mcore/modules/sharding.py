"""Sharded state dicts of modules: the walk over the tree, its groups, Megatron-LM's entries."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeGuard

import torch

from mcore.modules.config import read_field
from mcore.modules.traversal import attribute_or_none, iter_modules
from mcore.parallel.checkpoint import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from mcore.parallel.checkpoint.ranks import resolve_groups
from mcore.tensor.dtensor import is_dtensor

Offsets: TypeAlias = "Sequence[tuple[int, int, int]]"
Entries: TypeAlias = "dict[str, Any]"


def sharded_state_dict_of(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    *,
    tp_group: Any = None,
) -> Entries:
    """Return the sharded state dict of a module and all below it.

    Own tensors of the module are replicated. A child that has ``sharded_state_dict`` describes
    itself. A child that has none is replicated as a whole, or walked through in the same way if
    something below it has one, such as a ModuleList of layers. A child under two names has both
    keys, as in ``state_dict``; what torch.compile puts around a child is no part of them. No
    communication.

    Args:
        module: Any module; its own ``sharded_state_dict`` is not called.
        prefix: Put before each key, with its trailing dot.
        sharded_offsets: ``(axis, index, count)`` for each leading axis to put before those of the
            tensors; axes 0, 1, ...
        metadata: Passed to all modules below in a copy that holds the groups.
        tp_group: The tensor-parallel group, before any that ``module`` has.

    Returns:
        A ShardedTensor or ShardedObject for each key.

    Raises:
        TypeError: ``metadata`` is not a dict, or an offset is not a triple of ints.
        ValueError: Bad offsets, two entries with one key, or an unknown group (which is a
            RuntimeError too).

    Example:
        >>> import torch
        >>> entries = sharded_state_dict_of(torch.nn.Linear(3, 2), "m.", ((0, 1, 4),))
        >>> entries["m.weight"].global_shape, entries["m.weight"].global_offset
        ((4, 2, 3), (1, 0, 0))
    """
    offsets = _checked_offsets(sharded_offsets)
    module = _not_compiled(module)
    return _entries(module, prefix, offsets, _with_resolved_groups(module, metadata, tp_group))


def _with_resolved_groups(
    module: object, metadata: dict[str, Any] | None, tp_group: Any
) -> dict[str, Any]:
    """Return a copy of the metadata with the groups ``tp_group`` and ``dp_cp_group`` in it."""
    if metadata is not None and not isinstance(metadata, dict):
        raise TypeError(f"metadata is a {type(metadata).__name__}; pass a dict or None")
    own = attribute_or_none(module, "pg_collection")
    own_tp = attribute_or_none(module, "tp_group")
    if own is None and own_tp is None and tp_group is None and _is_resolved(metadata):
        return metadata
    resolved = dict(metadata or {})
    tp = _first_group(
        tp_group,
        own_tp,
        getattr(own, "tp", None),
        resolved.get("tp_group"),
    )
    dp_cp = _first_group(resolved.get("dp_cp_group"), getattr(own, "dp_cp", None))
    if tp is None or dp_cp is None:
        sizes = _model_sizes(attribute_or_none(module, "config"))
        pp_group = getattr(own, "pp", None)
        tp, dp_cp = resolve_groups(tp, dp_cp, pp_group=pp_group, model_sizes=sizes)
    resolved["tp_group"], resolved["dp_cp_group"] = tp, dp_cp
    return resolved


def _is_resolved(metadata: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Return whether a module above has found both groups."""
    return (
        metadata is not None
        and metadata.get("tp_group") is not None
        and metadata.get("dp_cp_group") is not None
    )


def _first_group(*candidates: Any) -> Any:
    for group in candidates:
        if group is not None:
            return group
    return None


def _model_sizes(config: object) -> tuple[int, int]:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tp_size, pp_size = (read_field(config, name, None) or 1 for name in names)
    return tp_size, pp_size


def _checked_offsets(offsets: Offsets) -> tuple[tuple[int, int, int], ...]:
    checked = tuple(tuple(offset) for offset in offsets)
    if not checked:
        return ()
    if any(len(offset) != 3 or any(type(n) is not int for n in offset) for offset in checked):
        raise TypeError(
            f"sharded_offsets is {offsets!r}; pass triples of ints (axis, index, count)"
        )
    if sorted(offset[0] for offset in checked) != list(range(len(checked))):
        raise ValueError(
            f"sharded_offsets {checked} has axes {[o[0] for o in checked]}; the axes put before "
            f"those of the tensors are {list(range(len(checked)))}, each once"
        )
    for axis, index, count in checked:
        if not 0 <= index < count:
            raise ValueError(
                f"sharded_offsets {checked} has index {index} of {count} on axis {axis}; "
                "0 <= index < count is needed"
            )
    return checked  # type: ignore[return-value]  # lengths are checked above


def _entries(
    module: torch.nn.Module, prefix: str, offsets: Offsets, metadata: dict[str, Any]
) -> Entries:
    entries: Entries = {}
    # Tensors of neighbouring modules wait here, so that one call describes them all.
    replicated = dict(_own_state(module))
    # named_children() would drop the second name of a shared child.
    for name, compiled_or_not in module._modules.items():
        if compiled_or_not is None:
            continue
        child = _not_compiled(compiled_or_not)
        if _describes_itself(child):
            described = sharded_state_dict_default(
                child, f"{prefix}{name}.", offsets, metadata, tp_group=metadata["tp_group"]
            )
        elif child._modules and any(map(_needs_walk, iter_modules(child))):
            described = _entries(child, f"{prefix}{name}.", offsets, metadata)
        else:
            is_plain = _is_plain_leaf(child)
            state = _plain_tensors(child) if is_plain else child.state_dict(keep_vars=True)
            _merge(replicated, {f"{name}.{key}": value for key, value in state.items()}, prefix)
            continue
        if replicated:
            _merge(entries, _replicated_entries(replicated, prefix, offsets, metadata))
            replicated = {}
        _merge(entries, described)
    _merge(entries, _replicated_entries(replicated, prefix, offsets, metadata))
    return entries


_PLAIN = torch.nn.Module


def _is_plain_leaf(module: torch.nn.Module) -> bool:
    """Return whether a module's state dict is its tensors, without hooks and methods of its own."""
    kind = type(module)
    return not (
        module._modules
        or module._state_dict_hooks
        or module._state_dict_pre_hooks
        or kind.state_dict is not _PLAIN.state_dict
        or kind._save_to_state_dict is not _PLAIN._save_to_state_dict
        or kind.get_extra_state is not _PLAIN.get_extra_state
    )


def _plain_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Return what the state dict of a plain leaf holds, several times faster."""
    tensors: dict[str, Any] = {
        name: tensor for name, tensor in module._parameters.items() if tensor is not None
    }
    if module._buffers:
        transient = module._non_persistent_buffers_set
        tensors.update(
            (name, buffer)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in transient
        )
    return tensors


def _needs_walk(module: torch.nn.Module) -> bool:
    return _describes_itself(module) or _not_compiled(module) is not module


def _not_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside one of torch.compile, whose name is no part of keys."""
    while type(module).__name__ == "OptimizedModule":
        module = module._modules["_orig_mod"] or module
    return module


def _describes_itself(module: torch.nn.Module) -> bool:
    return callable(attribute_or_none(module, "sharded_state_dict"))


def _replicated_entries(
    state: dict[str, Any], prefix: str, offsets: Offsets, metadata: dict[str, Any]
) -> Entries:
    entries: Entries = make_sharded_tensors_for_checkpoint(
        state,
        prefix,
        sharded_offsets=offsets,
        tp_group=metadata["tp_group"],
        dp_cp_group=metadata["dp_cp_group"],
    )
    return entries


def _own_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's part of its ``state_dict``: live parameters, with its hooks applied."""
    own: Any = OrderedDict()
    local_metadata = {"version": module._version}
    own._metadata = OrderedDict({"": local_metadata})
    for before in module._state_dict_pre_hooks.values():
        before(module, "", True)
    module._save_to_state_dict(own, "", True)
    for after in module._state_dict_hooks.values():
        replaced = after(module, own, "", local_metadata)
        own = own if replaced is None else replaced
    return own  # type: ignore[no-any-return]


def _merge(entries: Entries, more: Entries, prefix: str = "") -> None:
    if not entries.keys().isdisjoint(more):
        key = prefix + next(key for key in more if key in entries)
        raise ValueError(
            f"two entries have the key {key!r}; give one of the modules another prefix"
        )
    entries.update(more)


def to_megatron_sharded_state_dict(state_dict: Any) -> Any:
    """Return a sharded state dict whose entries are those of Megatron-LM's ``dist_checkpointing``.

    For a model of Megatron-LM with modules of this package in it: its
    ``dist_checkpointing.save`` and ``load`` take other entries for plain objects. No communication.

    Args:
        state_dict: Nested dicts, lists and tuples; entries of this package in them are converted,
            the local shard of a DTensor taken, and everything else stays as it is.

    Returns:
        The same structure; ``data`` is the live tensor.

    Raises:
        RuntimeError: megatron-core is not installed.

    Example:
        >>> to_megatron_sharded_state_dict({"step": 3})
        {'step': 3}
    """
    return _each_entry(state_dict, _to_megatron)


def from_megatron_sharded_state_dict(state_dict: Any) -> Any:
    """Return a sharded state dict whose entries are those of this package.

    For ``save_sharded_state_dict`` and ``load_sharded_state_dict`` of :mod:`mcore.parallel` with
    modules of Megatron-LM in a model. No communication.

    Args:
        state_dict: Nested dicts, lists and tuples; entries of Megatron-LM in them are converted,
            and everything else stays as it is.

    Returns:
        The same structure; ``data`` is the live tensor.

    Raises:
        ValueError: An entry is a factory; Megatron-LM's ``apply_factories`` resolves it before.
        CheckpointingException: An entry contradicts itself or is flattened.

    Example:
        >>> from_megatron_sharded_state_dict({"step": 3})
        {'step': 3}
    """
    return _each_entry(state_dict, _from_megatron)


_MEGATRON = "megatron.core.dist_checkpointing.mapping"
_ENTRY_CLASSES = {kind.__name__: kind for kind in (ShardedTensor, ShardedObject)}


def _each_entry(node: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(node, dict):
        return {key: _each_entry(value, convert) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_each_entry(value, convert) for value in node)
    return convert(node)


def _to_megatron(leaf: Any) -> Any:
    if not isinstance(leaf, (ShardedTensor, ShardedObject, LocalNonpersistentObject)):
        return leaf
    try:
        theirs = importlib.import_module(_MEGATRON)
    except ImportError as error:
        raise RuntimeError(
            f"entries for Megatron-LM need megatron-core: {error}; pip install megatron-core"
        ) from error
    kind = getattr(theirs, type(leaf).__name__)
    if isinstance(leaf, LocalNonpersistentObject):
        return kind(leaf.unwrap())
    values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    if is_dtensor(leaf.data):
        values["data"] = leaf.data.to_local()
    return kind(**values)


def _from_megatron(leaf: Any) -> Any:
    kinds = {kind.__name__ for kind in type(leaf).__mro__ if kind.__module__ == _MEGATRON}
    if not kinds:
        return leaf
    if "LocalNonpersistentObject" in kinds:
        return LocalNonpersistentObject(leaf.unwrap())
    name = next((name for name in _ENTRY_CLASSES if name in kinds), None)
    if name is None:
        raise ValueError(
            f"the entry {getattr(leaf, 'key', '')!r} is a {type(leaf).__name__}; resolve it with "
            "megatron.core.dist_checkpointing.mapping.apply_factories() before"
        )
    kind: Any = _ENTRY_CLASSES[name]
    return kind(**{field.name: getattr(leaf, field.name) for field in fields(kind)})
