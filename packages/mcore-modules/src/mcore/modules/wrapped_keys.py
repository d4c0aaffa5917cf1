"""State-dict keys of a wrapper, which come with or without the ``module.`` of its child."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

__all__ = ["add_wrapper_to_keys", "without_wrapper_in_keys"]

_CHILD = "module."


def add_wrapper_to_keys(
    state_dict: MutableMapping[str, Any], prefix: str, own_keys: Callable[[], Collection[str]]
) -> None:
    """Turn keys ``prefix + X`` into ``prefix + "module." + X``, in place, unless they are so.

    Args:
        state_dict: The state dict, with entries of other modules perhaps.
        prefix: The wrapper's prefix, with its trailing dot.
        own_keys: Gives the state-dict keys of the wrapped module; called only in doubt.

    Example:
        >>> state = {"child.weight": 1, "other": 2}
        >>> add_wrapper_to_keys(state, "child.", lambda: {"weight"})
        >>> state
        {'other': 2, 'child.module.weight': 1}
    """
    keys = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    if _have_wrapper(keys, own_keys):
        return
    moved = {prefix + _CHILD + key: state_dict.pop(prefix + key) for key in keys}
    state_dict.update(moved)


def without_wrapper_in_keys(
    state_dict: Mapping[str, Any], own_keys: Callable[[], Collection[str]]
) -> Mapping[str, Any]:
    """Return a state dict for the wrapped module, without ``module.`` before the keys.

    Args:
        state_dict: The state dict; not changed.
        own_keys: Gives the state-dict keys of the wrapped module; called only in doubt.

    Returns:
        ``state_dict`` itself if its keys are those of the wrapped module, else a new one with the
        versions of the modules in ``_metadata`` renamed too.

    Example:
        >>> dict(without_wrapper_in_keys({"module.weight": 1}, lambda: {"weight"}))
        {'weight': 1}
    """
    if not _have_wrapper(list(state_dict), own_keys):
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


def _have_wrapper(keys: Collection[str], own_keys: Callable[[], Collection[str]]) -> bool:
    """Count matches: the wrapped module may have a child called ``module`` itself."""
    if not any(key.startswith(_CHILD) for key in keys):
        return False
    own = own_keys()
    without = sum(key in own for key in keys)
    with_wrapper = sum(key.startswith(_CHILD) and key[len(_CHILD) :] in own for key in keys)
    if without or with_wrapper:
        return with_wrapper > without
    return all(key.startswith(_CHILD) for key in keys)
