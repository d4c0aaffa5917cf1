"""Deep copies of modules that refer to process groups."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.modules.traversal import iter_modules
from mcore.parallel.process_groups import ProcessGroups

__all__ = ["copy_sharing_groups"]

_ModuleT = TypeVar("_ModuleT", bound=torch.nn.Module)


def copy_sharing_groups(module: _ModuleT, memo: dict[int, Any]) -> _ModuleT:
    """Return what ``copy.deepcopy`` would, but share process groups, which cannot be copied.

    Shared are the process groups, device meshes and ProcessGroups that are attributes of the module
    or of a module below it. For ``__deepcopy__``.

    Args:
        module: The module; its own ``__deepcopy__`` is not called, ``__getstate__`` and
            ``__setstate__`` are.
        memo: What ``copy.deepcopy`` hands to ``__deepcopy__``.

    Returns:
        The copy.

    Example:
        >>> linear = torch.nn.Linear(2, 1)
        >>> copied = copy_sharing_groups(linear, {})
        >>> copied.weight is linear.weight, bool((copied.weight == linear.weight).all())
        (False, True)
    """
    for owner in iter_modules(module):
        for value in vars(owner).values():
            if isinstance(value, (dist.ProcessGroup, DeviceMesh, ProcessGroups)):
                memo[id(value)] = value
    copied = type(module).__new__(type(module))
    memo[id(module)] = copied
    # What object's reduce gives as state on every Python version, __getstate__ honoured.
    state = copy.deepcopy(module.__reduce_ex__(4)[2], memo)
    copied.__setstate__(state)  # type: ignore[no-untyped-call]
    return copied
