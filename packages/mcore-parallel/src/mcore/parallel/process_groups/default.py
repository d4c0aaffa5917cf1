"""The default ProcessGroups of this process: one slot, set only by the user."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from mcore.parallel.groups import (
    AnyGroup,
    GroupLike,
    NamedGroups,
    as_process_group,
    reject_destroyed,
    reject_non_member,
    take_group,
)
from mcore.parallel.process_groups.collection import ProcessGroups
from mcore.parallel.torch_compat import is_distributed

_Group = TypeVar("_Group")

# The source lines that were already warned about the default, by world group.
_warned: WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, int]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class _Slot:
    """A default and a weak reference to the world group at that time."""

    groups: ProcessGroups | None = None
    world: ref[dist.ProcessGroup] | None = None

    def is_stale(self) -> bool:
        # References to one world are equal. A reference to a world that is gone equals no other.
        return self.groups is not None and self.world != _refer_to_world()


# A plain global and not a contextvar: autograd and data-loader threads must see the value too.
_lock = threading.Lock()
_slot = _Slot()


def _refer_to_world() -> ref[dist.ProcessGroup] | None:
    return ref(cast("dist.ProcessGroup", dist.group.WORLD)) if is_distributed() else None


def _make_slot(pgs: NamedGroups | None) -> _Slot:
    if not (pgs is None or isinstance(pgs, ProcessGroups)):
        pgs = ProcessGroups.from_megatron(pgs)
    return _Slot(pgs, _refer_to_world())


def _swap(new: _Slot, expected: _Slot | None = None) -> _Slot:
    """Fill the slot, if it still is as expected, and return its former content."""
    global _slot
    with _lock:
        old = _slot
        if expected in (None, old):
            _slot = new
    return old


def set_default_process_groups(pgs: NamedGroups | None) -> ProcessGroups | None:
    """Make ``pgs`` the groups that functions of mcore use when no group is given.

    Local to the process, for all its threads. No communication. The default belongs to the
    current world group: it is dropped when torch.distributed is destroyed or initialised anew.
    It can also be set without torch.distributed.

    Args:
        pgs: The new default, also as a ProcessGroupCollection of megatron-core, or None to clear
            it.

    Returns:
        The previous default, or None when there was none or it belonged to an earlier world.

    Example:
        >>> from mcore.parallel import ProcessGroups
        >>> set_default_process_groups(ProcessGroups.from_sizes())
        >>> clear_default_process_groups()
    """
    old = _swap(_make_slot(pgs))
    return None if old.is_stale() else old.groups


def get_default_process_groups() -> ProcessGroups | None:
    """Return the groups that functions of mcore use when no group is given.

    Returns:
        The groups of the last :func:`set_default_process_groups`, or None. If the world group has
        changed since then (torch.distributed destroyed or initialised anew), the default is
        dropped with one RuntimeWarning and None is returned.

    Example:
        >>> get_default_process_groups() is None
        True
    """
    slot = _slot
    if slot.is_stale() and _swap(_Slot(), slot) is slot:
        warnings.warn(
            "the default ProcessGroups belonged to a torch.distributed world that no longer "
            "exists and was dropped: make a new one and call set_default_process_groups(...)",
            RuntimeWarning,
            stacklevel=2,
        )
    return _slot.groups


def clear_default_process_groups() -> None:
    """Clear the default groups, if there are any.

    Example:
        >>> clear_default_process_groups()
        >>> get_default_process_groups() is None
        True
    """
    _swap(_Slot())


@contextmanager
def use_process_groups(pgs: NamedGroups | None) -> Iterator[ProcessGroups | None]:
    """Make ``pgs`` the default inside a ``with`` block and restore the previous default after it.

    Local to the process, but for all its threads. The previous default is also restored after an
    exception.

    Args:
        pgs: The default inside the block, also as a ProcessGroupCollection of megatron-core. None
            means no default there.

    Yields:
        ``pgs``, as a ProcessGroups.

    Example:
        >>> from mcore.parallel import ProcessGroups
        >>> with use_process_groups(ProcessGroups()) as pgs:
        ...     get_default_process_groups() is pgs
        True
        >>> get_default_process_groups() is None
        True
    """
    new = _make_slot(pgs)
    old = _swap(new)
    try:
        yield new.groups
    finally:
        _swap(old)


def group_or_default(group: AnyGroup | None, field: str) -> GroupLike | None:
    """Return ``group``, or a field of it or, if it is None, of the default ProcessGroups."""
    holder = get_default_process_groups() if group is None else group
    return cast("GroupLike | None", take_group(holder, field))


def group_of_several(group: AnyGroup | None, field: str) -> dist.ProcessGroup | None:
    """Return the group, given or by default, or None when this rank is alone in it."""
    member = as_process_group(group_or_default(group, field))
    return None if member is None or member.size() == 1 else member


def get_tensor_model_parallel_group_if_none(
    tp_group: _Group | None, is_expert: bool = False, check_initialized: bool = True
) -> _Group | dist.ProcessGroup | None:
    """Return ``tp_group``, or the default tensor-parallel group with a deprecation warning.

    No communication.

    Args:
        tp_group: The caller's tensor-parallel group, or a collection with it, or None.
        is_expert: Use the tensor-parallel group of the experts (``expt_tp``) of the default.
        check_initialized: Raise if the default does not have the group.

    Returns:
        None if torch.distributed is not initialised. Else ``tp_group`` if it is given or there is
        no default ProcessGroups. Else ``tp`` or ``expt_tp`` of the default, with a
        DeprecationWarning once per call site, on global rank 0 only.

    Raises:
        ValueError: This rank is not a member of ``tp_group``, or it was destroyed.
        RuntimeError: The default has no such group and ``check_initialized`` is True.

    Example:
        >>> get_tensor_model_parallel_group_if_none(None) is None
        True
    """
    name = "expt_tp" if is_expert else "tp"
    tp_group = take_group(tp_group, name)
    reject_destroyed(tp_group)
    if not is_distributed():
        return None
    reject_non_member(tp_group)
    default = get_default_process_groups()
    if default is None or tp_group is not None:
        return tp_group
    frame = sys._getframe(1)
    site = frame.f_code.co_filename, frame.f_lineno
    sites = _warned.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), set())
    if dist.get_rank() == 0 and site not in sites:
        sites.add(site)
        warnings.warn(
            "tp_group is None: using the tensor-parallel group of the default ProcessGroups. "
            "Pass tp_group explicitly",
            DeprecationWarning,
            stacklevel=2,
        )
    found: dist.ProcessGroup | None = getattr(default, name)
    if found is None and check_initialized:
        raise RuntimeError(
            f"the default ProcessGroups has no {name} group: create it with "
            f"ProcessGroups.from_sizes(...) or set its {name} field, or pass tp_group"
        )
    return found
