"""Keys of a state dict with and without ``module.``, the name of a module in its wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

_NAME = "module"
_CHILD = f"{_NAME}."  # the prefix of keys of the module inside a wrapper


def add_wrapper_to_keys(
    state_dict: MutableMapping[str, Any], prefix: str, own_keys: Callable[[], Collection[str]]
) -> None:
    """Put ``module.`` after the prefix of keys, in place. ``own_keys`` is called only in doubt."""
    keys = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    if _has_wrapper(keys, own_keys):
        return
    moved = {prefix + _CHILD + key: state_dict.pop(prefix + key) for key in keys}
    state_dict.update(moved)


def without_wrapper_in_keys(
    state_dict: Mapping[str, Any], own_keys: Callable[[], Collection[str]]
) -> Mapping[str, Any]:
    """Return a state dict for the wrapped module, without ``module.`` before keys and versions."""
    if not _has_wrapper(list(state_dict), own_keys):
        return state_dict
    renamed: OrderedDict[str, Any] = OrderedDict(
        (key.removeprefix(_CHILD), value) for key, value in state_dict.items()
    )
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        renamed._metadata = {  # type: ignore[attr-defined]
            f"{key}.".removeprefix(_CHILD).removesuffix("."): value
            for key, value in metadata.items()
        }
    return renamed


def _has_wrapper(keys: Collection[str], own_keys: Callable[[], Collection[str]]) -> bool:
    """Count matching keys, since the wrapped module may have a child called ``module`` too."""
    if not any(key.startswith(_CHILD) for key in keys):
        return False
    inside = own_keys()
    without = sum(key in inside for key in keys)
    with_wrapper = sum(key.startswith(_CHILD) and key[len(_CHILD) :] in inside for key in keys)
    if without or with_wrapper:
        return with_wrapper > without
    return all(key.startswith(_CHILD) for key in keys)


def repeat_versions_below_wrapper(state: Mapping[str, Any], prefix: str) -> None:
    """Repeat versions under ``module``, the name by which a parent loads the wrapper."""
    metadata = getattr(state, "_metadata", None)
    if metadata is None or not prefix:
        return
    below = {key: version for key, version in metadata.items() if f"{key}.".startswith(prefix)}
    for key, version in below.items():
        metadata.setdefault(f"{prefix}module.{key[len(prefix) :]}".removesuffix("."), version)


def wrapped_names(inside: torch.nn.Module) -> dict[str, str]:
    """Return names inside a wrapper, which torch finds only through the child ``module``."""
    return _Names.fromkeys((*inside._modules, *inside._parameters, *inside._buffers), _NAME)


class _Names(dict[str, str]):
    """Refuses the name of the child, under which torch would store the state of an optimizer.

    torch would not find it when loading: the model's keys do not contain the child.
    """

    def get(self, name: str, default: Any = None) -> Any:
        if name == _NAME and name not in self:
            raise RuntimeError(
                "torch would store the state of the optimizer under names with 'module' of the "
                "Float16Module inside the model, and would not find them when loading. Pass the "
                "Float16Module itself, such as model.module of a DistributedDataParallel: "
                "get_state_dict(model.module, optimizer)"
            )
        return super().get(name, default)
