"""How the weights of a kind of module are distributed over tensor-parallel ranks."""

from __future__ import annotations

import sys
from typing import Literal, TypeAlias, get_args

from mcore.versioning import internal_api

__all__ = ["ModuleParallelism", "get_module_parallelism", "register_module_parallelism"]

ModuleParallelism: TypeAlias = Literal["column", "row", "replicated"]

_kinds: dict[str, ModuleParallelism] = {}


def register_module_parallelism(class_name: str, kind: ModuleParallelism) -> None:
    """Say how modules of a class, or of its subclasses, are distributed.

    Args:
        class_name: The class's name, without its module.
        kind: ``"column"``, ``"row"`` or ``"replicated"``.

    Raises:
        ValueError: Another kind, or the class is registered with another one.

    Example:
        >>> register_module_parallelism("RowLinear", "row")
        >>> get_module_parallelism("RowLinear")
        'row'
    """
    if kind not in get_args(ModuleParallelism):
        raise ValueError(f"kind={kind!r} is unknown; choose {list(get_args(ModuleParallelism))}")
    registered = _kinds.setdefault(class_name, kind)
    if registered != kind:
        raise ValueError(
            f"{class_name} is registered as {registered!r}, not {kind!r}; register it once"
        )


def get_module_parallelism(module_or_name: object) -> ModuleParallelism | None:
    """Return how a module is distributed, by its class or the nearest of its base classes.

    Args:
        module_or_name: A module or the name of a class.

    Returns:
        The kind that was registered, or None.

    Example:
        >>> import torch
        >>> get_module_parallelism(torch.nn.Identity()) is None
        True
    """
    if isinstance(module_or_name, str):
        return _kinds.get(module_or_name)
    names = (cls.__name__ for cls in type(module_or_name).__mro__)
    return next((_kinds[name] for name in names if name in _kinds), None)


@internal_api
def _register_linear_for_last_layer_mapping() -> None:
    """Register LinearForLastLayer as replicated, with Megatron Bridge too where it is imported."""
    register_module_parallelism("LinearForLastLayer", "replicated")
    bridge = sys.modules.get("megatron.bridge.models.conversion.param_mapping")
    register = getattr(getattr(bridge, "AutoMapping", None), "register_module_type", None)
    if callable(register):
        register("LinearForLastLayer", "replicated")
