"""The size of a process group, this rank's position in it, and its first rank."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.torch_compat import has_destroyed_groups, is_destroyed, is_distributed
from mcore.tensor.device import available_accelerator


class SizedGroup(Protocol):
    """Any object with a size and a rank, such as a stub in a user's test."""

    def size(self) -> int: ...
    def rank(self) -> int: ...


class NamedGroups(Protocol):
    """Groups by name: a ProcessGroups, or a ProcessGroupCollection of megatron-core."""

    @property
    def tp(self) -> Any: ...


GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | SizedGroup"
AnyGroup: TypeAlias = "GroupLike | NamedGroups"  # a group, or a collection that has it


def is_collection(given: object) -> bool:
    """Return whether an object is a collection of groups, without an import of megatron-core."""
    if given is None or isinstance(given, dist.ProcessGroup):  # the usual cases, and quicker
        return False
    kinds = {kind.__name__ for kind in type(given).__mro__}
    return not kinds.isdisjoint(("ProcessGroups", "ProcessGroupCollection"))


def take_group(given: Any, field: str) -> Any:
    """Return a group as it is, or the group of this field of a collection. None stays None.
    ValueError if a collection of megatron-core has not set the field.
    """
    if not is_collection(given):
        return given
    if not hasattr(given, field):
        raise ValueError(f"the {type(given).__name__} has no {field} group: set it, or pass it")
    return getattr(given, field)


def as_process_group(group: GroupLike | None) -> dist.ProcessGroup | None:
    """Return a group of this rank, also from a 1-D mesh, or None if there is no parallelism."""
    if group is None:
        return None
    if is_collection(group):
        raise TypeError(f"got a {type(group).__name__} as a process group: pass a group of it")
    reject_destroyed(group)
    if not is_distributed():
        return None
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise TypeError(
                f"got a {group.ndim}-D DeviceMesh {tuple(group.shape)} as a process group: pass a "
                '1-D mesh, such as mesh["tp"]'
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the DeviceMesh over ranks "
                f"{group.mesh.tolist()}: call this on its members only"
            )
        return group.get_group()
    reject_non_member(group)
    if not (callable(getattr(group, "size", None)) and callable(getattr(group, "rank", None))):
        raise TypeError(
            f"got {type(group).__name__} as a process group: pass a ProcessGroup, a 1-D "
            "DeviceMesh, None, or an object with size() and rank()"
        )
    return cast("dist.ProcessGroup", group)


def reject_destroyed(group: object) -> None:
    """Raise ValueError for a group or a mesh whose torch.distributed world no longer exists."""
    if is_destroyed(group):
        subject = "process group was"
    elif isinstance(group, DeviceMesh) and has_destroyed_groups(group):
        subject = f"groups of {group} were"
    else:
        return
    raise ValueError(
        f"the {subject} destroyed, alone or with the torch.distributed world. Make new groups and "
        "meshes after init_process_group, for example with ProcessGroups.from_sizes(...)"
    )


def reject_non_member(group: object) -> None:
    """Raise ValueError for the placeholder that torch returns to ranks outside a new group."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, int):
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group (got {group!r}, which "
            "torch.distributed.new_group returns to ranks outside the group). Call this on "
            "members only, or pass None if there is no parallelism"
        )


def get_pg_size(group: GroupLike | None = None) -> int:
    """Return the number of ranks in a group. None means no parallelism.

    No communication.

    Args:
        group: A process group, a 1-D DeviceMesh, or None. None is *not* the world group.

    Returns:
        The size, or 1 when torch.distributed is not initialised or ``group`` is None.

    Raises:
        ValueError: This rank is not a member of the group.
        TypeError: A mesh with more dimensions than one, or an object that is not a group.

    Example:
        >>> get_pg_size(None)
        1
    """
    member = as_process_group(group)
    return 1 if member is None else member.size()


def world_size() -> int:
    """Return the size of the world group, 1 without torch.distributed."""
    return dist.get_world_size() if is_distributed() else 1


def get_pg_rank(group: GroupLike | None = None) -> int:
    """Return this process's rank inside a group. None means no parallelism.

    No communication.

    Args:
        group: A process group, a 1-D DeviceMesh, or None. None is *not* the world group.

    Returns:
        The rank in the group, or 0 when torch.distributed is not initialised or ``group`` is None.

    Raises:
        ValueError: This rank is not a member of the group.
        TypeError: A mesh with more dimensions than one, or an object that is not a group.

    Example:
        >>> get_pg_rank(None)
        0
    """
    member = as_process_group(group)
    return 0 if member is None else member.rank()


def get_pg_src_rank(group: GroupLike | None = None) -> int:
    """Return the global rank of a group's first member, the usual source of a broadcast.

    No communication. The first member is the first in the group's order. It need not have the
    lowest rank if the group was made with ``new_group(..., sort_ranks=False)``.

    Args:
        group: A process group, a 1-D DeviceMesh, or None. None is *not* the world group.

    Returns:
        The global rank, or 0 when torch.distributed is not initialised or ``group`` is None.

    Raises:
        ValueError: This rank is not a member of the group.
        TypeError: A mesh with more dimensions than one, or an object that torch.distributed does
            not recognise as a group.

    Example:
        >>> get_pg_src_rank(None)
        0
    """
    member = as_process_group(group)
    return 0 if member is None else group_ranks(member)[0]


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """List the global ranks of a group in the group's order. TypeError for an unknown group."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, TypeError) as error:
        raise TypeError(
            f"torch.distributed has no global ranks for {type(group).__name__}: pass a group "
            "made by torch.distributed, or a 1-D DeviceMesh"
        ) from error


def comm_device(group: GroupLike | None = None) -> torch.device:
    """Return the device of small tensors for a collective over ``group`` (None: the world).
    The CPU if a backend of the group supports it, which saves a wait for the accelerator.
    """
    member = as_process_group(group)
    if not is_distributed():
        return torch.device("cpu")
    if member is not None and not isinstance(member, dist.ProcessGroup):
        return torch.device("cpu")
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(member).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    bound = cast("dist.ProcessGroup", member or dist.group.WORLD).bound_device_id
    if bound is not None and bound.type in kinds:
        return bound
    accelerator = available_accelerator()
    if accelerator is not None and accelerator.type in kinds:
        return accelerator
    return torch.device(kinds[0])
