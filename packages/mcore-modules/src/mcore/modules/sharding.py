"""Sharded state dicts of modules: the walk over the module tree, and its groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch

from mcore.modules.config import read_field
from mcore.modules.traversal import attribute_or_none, iter_modules
from mcore.parallel.checkpoint import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from mcore.parallel.checkpoint.builders import (
    look_inside_megatron,
    resolve_groups,
    strip_wrapper_names,
)
from mcore.tensor.param_flags import ensure_params_ready

Offsets: TypeAlias = "Sequence[tuple[int, int, int]]"
Entries: TypeAlias = "dict[str, Any]"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def sharded_state_dict_of(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    *,
    tp_group: Any = None,
) -> Entries:
    """Return the sharded state dict of a module and all below it.

    Tensors of the module itself are replicated. A child with ``sharded_state_dict`` describes
    itself. A child without it is replicated as a whole, or walked in the same way if a module below
    it has the method, such as a ModuleList of layers. A child under two names has both keys, as in
    ``state_dict``. Keys do not contain the names that torch.compile and the wrappers of
    torch for checkpointing and FSDP insert, and no ``module.`` for wrappers of Megatron-LM. No
    communication.

    Args:
        module: Any module. Its ``sharded_state_dict`` is not called. That of the module in a
            wrapper of Megatron-LM is.
        prefix: Put before each key, with its trailing dot.
        sharded_offsets: ``(axis, index, count)`` for each leading axis to put before the axes of
            the tensors. The axes are 0, 1, ...
        metadata: Passed to all modules below in a copy that holds the groups.
        tp_group: The tensor-parallel group, preferred over the groups of ``module``.

    Returns:
        A ShardedTensor or ShardedObject for each key.

    Raises:
        TypeError: ``metadata`` is not a dict, or an offset is not a triple of ints.
        ValueError: Bad offsets, two entries with one key, or an unknown group (then also a
            RuntimeError).

    Example:
        >>> import torch
        >>> entries = sharded_state_dict_of(torch.nn.Linear(3, 2), "m.", ((0, 1, 4),))
        >>> entries["m.weight"].global_shape, entries["m.weight"].global_offset
        ((4, 2, 3), (1, 0, 0))
    """
    offsets = _check_offsets(sharded_offsets)
    inner = look_inside_megatron(module)
    # Without parameters(), which builds all names: a fifth of the time of the whole call.
    held = [each._parameters.values() for each in iter_modules(inner) if each._parameters]
    ensure_params_ready(chain.from_iterable(held))
    walk = _Walk(prefix, offsets, _resolve_groups_into(inner, metadata, tp_group))
    if inner is module:
        walk.visit(module, "")
    else:
        walk.add(inner, "")
    return walk.entries()


def _resolve_groups_into(
    module: object, metadata: dict[str, Any] | None, tp_group: Any
) -> dict[str, Any]:
    """Return a copy of the metadata with the groups ``tp_group`` and ``dp_cp_group`` in it."""
    if metadata is not None and not isinstance(metadata, dict):
        raise TypeError(f"metadata is a {type(metadata).__name__}. Pass a dict or None")
    groups = attribute_or_none(module, "pg_collection")
    module_tp = attribute_or_none(module, "tp_group")
    # The usual case in a walk: a module above has found both groups, and this one has no others.
    if groups is None and module_tp is None and tp_group is None and metadata is not None:
        found = (metadata.get("tp_group"), metadata.get("dp_cp_group"))
        if None not in found:
            return metadata
    resolved = dict(metadata or {})
    tp = _choose_first_group(
        tp_group,
        module_tp,
        getattr(groups, "tp", None),
        resolved.get("tp_group"),
    )
    dp_cp = _choose_first_group(resolved.get("dp_cp_group"), getattr(groups, "dp_cp", None))
    if tp is None or dp_cp is None:
        config = attribute_or_none(module, "config")
        tp_size, pp_size = (
            read_field(config, f"{name}_model_parallel_size", None) or 1
            for name in ("tensor", "pipeline")
        )
        pp_group = getattr(groups, "pp", None)
        tp, dp_cp = resolve_groups(tp, dp_cp, pp_group=pp_group, model_sizes=(tp_size, pp_size))
    resolved["tp_group"], resolved["dp_cp_group"] = tp, dp_cp
    return resolved


def _choose_first_group(*candidates: Any) -> Any:
    for group in candidates:
        if group is not None:
            return group
    return None


def _check_offsets(offsets: Offsets) -> tuple[tuple[int, int, int], ...]:
    checked = tuple(tuple(offset) for offset in offsets)
    if not checked:
        return ()
    if any(len(offset) != 3 or any(type(n) is not int for n in offset) for offset in checked):
        raise TypeError(
            f"sharded_offsets is {offsets!r}. Pass triples of ints (axis, index, count)"
        )
    if sorted(offset[0] for offset in checked) != list(range(len(checked))):
        raise ValueError(
            f"sharded_offsets {checked} has axes {[o[0] for o in checked]}. Pass the axes "
            f"{list(range(len(checked)))}, each once: they precede the axes of the tensors"
        )
    for axis, index, count in checked:
        if not 0 <= index < count:
            raise ValueError(
                f"sharded_offsets {checked} has index {index} of {count} on axis {axis}. Pass "
                "0 <= index < count"
            )
    return checked  # type: ignore[return-value]  # lengths are checked above


def describes_by_walk(method: _Method) -> _Method:
    """Mark a ``sharded_state_dict`` that is equivalent to the walk, which then need not call it."""
    method.describes_by_walk = method  # type: ignore[attr-defined]
    return method


class _Walk:
    """A walk over modules. Tensors of plain modules wait, to describe many in one call."""

    def __init__(self, prefix: str, offsets: Offsets, metadata: dict[str, Any]) -> None:
        self._prefix = prefix
        self._offsets = offsets
        self._metadata = metadata
        self._entries: Entries = {}
        self._waiting: dict[str, Any] = {}

    def visit(self, module: torch.nn.Module, path: str) -> None:
        """Add the state of a module and of all below it."""
        state = _list_plain_tensors(module) if _is_plain(module) else _read_own_state(module)
        self._wait(state, path)
        # named_children() would drop the second name of a shared child.
        for name, child in module._modules.items():
            if child is not None:
                self.add(child, path + strip_wrapper_names(f"{name}."))

    def entries(self) -> Entries:
        """Describe the waiting tensors, and return all entries."""
        if self._waiting:
            described: Entries = make_sharded_tensors_for_checkpoint(
                self._waiting,
                self._prefix,
                sharded_offsets=self._offsets,
                tp_group=self._metadata["tp_group"],
                dp_cp_group=self._metadata["dp_cp_group"],
            )
            _merge_entries(self._entries, described)
            self._waiting = {}
        return self._entries

    def add(self, child: torch.nn.Module, path: str) -> None:
        """Add the state of a child: its ``sharded_state_dict`` if it has one."""
        child = look_inside_megatron(child)
        if _is_self_describing(child):
            if self._is_walked(child):
                self.visit(child, path)
            else:
                tp_group = self._metadata["tp_group"]
                described = sharded_state_dict_default(
                    child, self._prefix + path, self._offsets, self._metadata, tp_group=tp_group
                )
                # entries() describes the waiting tensors first, which keeps the order of modules.
                _merge_entries(self.entries(), described)
        elif child._modules and any(map(_is_self_describing, iter_modules(child))):
            self.visit(child, path)
        elif not child._modules and _is_plain(child):
            self._wait(_list_plain_tensors(child), path)
        else:
            self._wait(child.state_dict(keep_vars=True), path)

    def _is_walked(self, child: torch.nn.Module) -> bool:
        """Return whether a child's method would do the same with the same groups."""
        method = getattr(type(child), "sharded_state_dict", None)
        # The method is its own mark, since functools.wraps copies marks to other methods.
        is_ours = method is not None and getattr(method, "describes_by_walk", None) is method
        if "sharded_state_dict" in vars(child) or not is_ours:
            return False
        metadata = self._metadata
        resolved = _resolve_groups_into(child, metadata, None)
        return all(resolved[name] is metadata[name] for name in ("tp_group", "dp_cp_group"))

    def _wait(self, state: dict[str, Any], path: str) -> None:
        waiting = self._waiting
        for name, value in state.items():
            key = path + strip_wrapper_names(name)
            if key in waiting:
                raise _make_key_error(self._prefix + key)
            waiting[key] = value


_PLAIN = torch.nn.Module


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module's state is only its tensors, without hooks and overridden methods."""
    kind = type(module)
    return not (
        module._state_dict_hooks
        or module._state_dict_pre_hooks
        or kind.state_dict is not _PLAIN.state_dict
        or kind._save_to_state_dict is not _PLAIN._save_to_state_dict
        or kind.get_extra_state is not _PLAIN.get_extra_state
    )


def _list_plain_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Return a plain module's part of the state dict, several times faster than torch."""
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


def _is_self_describing(module: torch.nn.Module) -> bool:
    return callable(attribute_or_none(module, "sharded_state_dict"))


def _read_own_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's part of its ``state_dict``: live parameters, with its hooks applied."""
    state: Any = OrderedDict()
    local_metadata = {"version": module._version}
    state._metadata = OrderedDict({"": local_metadata})
    for before in module._state_dict_pre_hooks.values():
        before(module, "", True)
    module._save_to_state_dict(state, "", True)
    for after in module._state_dict_hooks.values():
        replaced = after(module, state, "", local_metadata)
        state = state if replaced is None else replaced
    return state  # type: ignore[no-any-return]


def _merge_entries(entries: Entries, more: Entries) -> None:
    if not entries.keys().isdisjoint(more):
        raise _make_key_error(next(key for key in more if key in entries))
    entries.update(more)


def _make_key_error(key: str) -> ValueError:
    return ValueError(f"two entries have the key {key!r}. Give one of the modules another prefix")
