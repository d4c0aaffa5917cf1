"""Conversion between sharded state dicts of this project and of Megatron-LM."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from mcore.parallel.checkpoint import LocalNonpersistentObject, ShardedObject, ShardedTensor
from mcore.tensor.dtensor import is_dtensor


def to_megatron_sharded_state_dict(state_dict: Any) -> Any:
    """Return a sharded state dict whose entries are those of Megatron-LM's ``dist_checkpointing``.

    For a model of Megatron-LM with modules of this package in it. Megatron's
    ``dist_checkpointing.save`` and ``load`` would treat other entries as plain objects. No
    communication.

    Args:
        state_dict: Nested dicts, lists and tuples. Entries of this package in them are converted,
            with the local shard of a DTensor. Everything else is returned unchanged.

    Returns:
        The same structure. ``data`` is the live tensor.

    Raises:
        RuntimeError: megatron-core is not installed.

    Example:
        >>> to_megatron_sharded_state_dict({"step": 3})
        {'step': 3}
    """
    return _convert_entries(state_dict, _convert_to_megatron)


def from_megatron_sharded_state_dict(state_dict: Any) -> Any:
    """Return a sharded state dict whose entries are those of this package.

    For ``save_sharded_state_dict`` and ``load_sharded_state_dict`` of :mod:`mcore.parallel` with
    modules of Megatron-LM in a model. No communication.

    Args:
        state_dict: Nested dicts, lists and tuples. Entries of Megatron-LM in them are converted.
            Everything else is returned unchanged.

    Returns:
        The same structure. ``data`` is the live tensor.

    Raises:
        ValueError: An entry is a factory. Call Megatron-LM's ``apply_factories`` first.
        CheckpointingException: An entry is inconsistent or flattened.

    Example:
        >>> from_megatron_sharded_state_dict({"step": 3})
        {'step': 3}
    """
    return _convert_entries(state_dict, _convert_from_megatron)


_MEGATRON = "megatron.core.dist_checkpointing.mapping"
_ENTRY_CLASSES = {kind.__name__: kind for kind in (ShardedTensor, ShardedObject)}


def _convert_entries(node: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(node, dict):
        return {key: _convert_entries(value, convert) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_convert_entries(value, convert) for value in node)
    return convert(node)


def _convert_to_megatron(leaf: Any) -> Any:
    if not isinstance(leaf, (ShardedTensor, ShardedObject, LocalNonpersistentObject)):
        return leaf
    try:
        theirs = importlib.import_module(_MEGATRON)
    except ImportError as error:
        raise RuntimeError(
            f"entries for Megatron-LM need megatron-core: {error}. Run pip install megatron-core"
        ) from error
    # A subclass that Megatron-LM lacks becomes its base, such as an object that is pickled there.
    names = [kind.__name__ for kind in type(leaf).__mro__]
    kind = getattr(theirs, next(name for name in names if hasattr(theirs, name)))
    if isinstance(leaf, LocalNonpersistentObject):
        return kind(leaf.unwrap())
    values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    if is_dtensor(leaf.data):
        values["data"] = leaf.data.to_local()
    return kind(**values)


def _convert_from_megatron(leaf: Any) -> Any:
    kinds = {kind.__name__ for kind in type(leaf).__mro__ if kind.__module__ == _MEGATRON}
    if not kinds:
        return leaf
    if "LocalNonpersistentObject" in kinds:
        return LocalNonpersistentObject(leaf.unwrap())
    name = next((name for name in _ENTRY_CLASSES if name in kinds), None)
    if name is None:
        raise ValueError(
            f"the entry {getattr(leaf, 'key', '')!r} is a {type(leaf).__name__}. Resolve it with "
            "megatron.core.dist_checkpointing.mapping.apply_factories() before"
        )
    kind: Any = _ENTRY_CLASSES[name]
    return kind(**{field.name: getattr(leaf, field.name) for field in fields(kind)})
