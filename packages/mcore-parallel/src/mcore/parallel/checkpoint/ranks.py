"""This rank's place among tensor-parallel parts and data-parallel copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import GroupLike, as_process_group, get_pg_size, group_ranks
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.torch_compat import is_distributed

__all__ = [
    "CheckpointRanks",
    "ensure_metadata_has_dp_cp_group",
    "mesh_has_group",
    "mesh_spans_world",
    "resolve_ranks",
]


class CheckpointRanks(NamedTuple):
    """Which part and which copy of a parameter this rank holds.

    Attributes:
        tp_group: The tensor-parallel group; None stands for one of size 1.
        tp_size: Its size.
        tp_rank: This rank in it.
        dp_cp_rank: This rank among the data- and context-parallel copies.
        copy_id: The replica id of what every rank of both groups has a copy of.
    """

    tp_group: GroupLike | None
    tp_size: int
    tp_rank: int
    dp_cp_rank: int

    @property
    def copy_id(self) -> tuple[int, int, int]:
        return (0, self.tp_rank, self.dp_cp_rank)


def resolve_ranks(
    tp_group: GroupLike | None,
    dp_cp_group: GroupLike | None,
    *,
    need_dp_cp: bool = True,
) -> CheckpointRanks:
    """Find both groups, each on its own: argument, else default ProcessGroups, else size 1.

    Size 1 is taken only where it is certain: torch.distributed is not initialised, the world has
    one rank, or the other group (times pipeline stages) fills the world. No communication.

    Args:
        tp_group: The tensor-parallel group, or None.
        dp_cp_group: The data- and context-parallel group, or None.
        need_dp_cp: Raise when the data-parallel group cannot be found.

    Returns:
        Sizes and ranks.

    Raises:
        RuntimeError: A group that is needed is neither given nor implied: a guess would make
            several ranks write the same tensor.
        ValueError: This rank is not a member of a given group.
    """
    default = get_default_process_groups()
    if default is not None:
        tp_group = default.tp if tp_group is None else tp_group
        dp_cp_group = default.dp_cp if dp_cp_group is None else dp_cp_group
    tp_size, tp_rank = _size_and_rank(tp_group)
    dp_cp_size, dp_cp_rank = _size_and_rank(dp_cp_group)
    if tp_group is None or (dp_cp_group is None and need_dp_cp):
        world = dist.get_world_size() if is_distributed() else 1
        stages = 1 if default is None else get_pg_size(default.pp)
        if world > 1 and tp_size * dp_cp_size * stages != world:
            raise _unknown_group("tp_group" if tp_group is None else "dp_cp_group", world)
    return CheckpointRanks(tp_group, tp_size, tp_rank, dp_cp_rank)


def _size_and_rank(group: GroupLike | None) -> tuple[int, int]:
    member = as_process_group(group)
    return (1, 0) if member is None else (member.size(), member.rank())


def _unknown_group(name: str, world: int) -> RuntimeError:
    field = "tp" if name == "tp_group" else "dp_cp"
    return RuntimeError(
        f"{name} is not given, there is no default ProcessGroups with a {field} group, and the "
        f"groups that are known do not fill the world of {world} ranks; pass {name}=..., or call "
        "set_default_process_groups(ProcessGroups.from_sizes(...))"
    )


def mesh_spans_world(mesh: DeviceMesh) -> bool:
    """Say whether a mesh has all ranks, so that its placements settle every parallelism."""
    return is_distributed() and mesh.size() == dist.get_world_size()


def mesh_has_group(mesh: DeviceMesh, group: GroupLike | None) -> bool:
    """Say whether all ranks of a group lie in a mesh, so that its placements cover the group."""
    if mesh_spans_world(mesh) or "tp" in (mesh.mesh_dim_names or ()):
        return True
    member = as_process_group(group)
    if not isinstance(member, dist.ProcessGroup):
        return False
    return set(group_ranks(member)) <= set(mesh.mesh.flatten().tolist())


def ensure_metadata_has_dp_cp_group(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of ``metadata`` that holds the key ``dp_cp_group``.

    The caller's dict is left alone, so no process group slips into a saved configuration. No
    communication.

    Args:
        metadata: What is passed down through ``sharded_state_dict`` calls, or None.

    Returns:
        A new dict. Where the key was missing its value is the default ProcessGroups' ``dp_cp``,
        or None, which the builders resolve.

    Raises:
        TypeError: ``metadata`` is no mapping.

    Example:
        >>> ensure_metadata_has_dp_cp_group(None)
        {'dp_cp_group': None}
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict or None, got {type(metadata).__name__}")
    found = dict(metadata or {})
    if "dp_cp_group" not in found:
        default = get_default_process_groups()
        found["dp_cp_group"] = None if default is None else default.dp_cp
    return found
