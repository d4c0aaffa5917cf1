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
            with the local shard of a DTensor. Everything else, also an entry of Megatron-LM, is
            returned unchanged.

    Returns:
        The same structure. ``data`` is the live tensor.

    Raises:
        RuntimeError: megatron-core is not installed.
        ValueError: An entry has a value that this release of megatron-core cannot store.

    Example:
        >>> to_megatron_sharded_state_dict({"step": 3})
        {'step': 3}
    """
    return _convert_entries(state_dict, _convert_to_megatron)


def from_megatron_sharded_state_dict(state_dict: Any) -> Any:
    """Return a sharded state dict whose entries are those of this package.

    For ``save_sharded_state_dict`` and ``load_sharded_state_dict`` of :mod:`mcore.parallel` with
    modules and optimizers of Megatron-LM. No communication.

    A factory becomes the entries that it builds. After a load, Megatron-LM puts their tensors
    together: ``apply_factory_merges(loaded, factories)``, where ``factories`` is the first result
    of ``extract_matching_values(state_dict, lambda one: isinstance(one, ShardedTensorFactory))``.

    Args:
        state_dict: Nested dicts, lists and tuples. Entries of Megatron-LM in them are converted.
            Everything else is returned unchanged.

    Returns:
        The same structure. ``data`` is the live tensor.

    Raises:
        ValueError: An entry is a flattened range, as optimizers of megatron-core before 0.16 make.
        CheckpointingException: An entry is inconsistent.

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
    known = {field.name for field in fields(kind)}
    lost = [name for name in values.keys() - known if values.pop(name)]
    if lost:
        raise ValueError(
            f"key {leaf.key!r}: this release of megatron-core has no {', '.join(lost)}. Save the "
            "state dict with mcore.parallel.checkpoint.save_sharded_state_dict"
        )
    return kind(**values)


def _convert_from_megatron(leaf: Any) -> Any:
    kinds = {kind.__name__ for kind in type(leaf).__mro__ if kind.__module__ == _MEGATRON}
    if not kinds:
        return leaf
    if "LocalNonpersistentObject" in kinds:
        return LocalNonpersistentObject(leaf.unwrap())
    if "ShardedTensorFactory" in kinds:
        return _convert_entries(leaf.build(), _convert_from_megatron)
    if getattr(leaf, "flattened_range", None) is not None:
        raise ValueError(
            f"key {leaf.key!r}: the entry is a flattened range {leaf.flattened_range} of a tensor, "
            "and here an entry is a box. Choose a format of Megatron's optimizer without flattened "
            "ranges, such as fully_reshardable"
        )
    kind: Any = next(_ENTRY_CLASSES[name] for name in _ENTRY_CLASSES if name in kinds)
    # A field that another release of megatron-core lacks has its default.
    given = {field.name for field in fields(kind)} & {field.name for field in fields(leaf)}
    return kind(**{name: getattr(leaf, name) for name in given})
