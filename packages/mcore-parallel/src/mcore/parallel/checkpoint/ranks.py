"""The process groups of a sharded state dict, and this rank's place in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import (
    GroupLike,
    as_process_group,
    get_pg_size,
    group_ranks,
    world_size,
)
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.torch_compat import is_distributed


class UnknownGroupError(RuntimeError, ValueError):
    """A group is neither given nor implied. A guess could write tensors twice or not at all."""


class _OneRank:
    """A group of this rank alone. torch makes one only with communication."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "one rank"


ONE_RANK = _OneRank()


class CheckpointRanks(NamedTuple):
    """This rank's part of a parameter, and the number of its replica."""

    tp_group: GroupLike
    tp_size: int
    tp_rank: int
    dp_cp_rank: int

    @property
    def replica_id(self) -> tuple[int, int, int]:
        """The replica id of a tensor or object that every rank of both groups holds."""
        return (0, self.tp_rank, self.dp_cp_rank)


def resolve_ranks(
    tp_group: GroupLike | None, dp_cp_group: GroupLike | None, *, need_dp_cp: bool = True
) -> CheckpointRanks:
    """Return this rank's place in the groups of a single tensor, see :func:`resolve_groups`."""
    tp_group, dp_cp_group = resolve_groups(tp_group, dp_cp_group, need_dp_cp=need_dp_cp)
    tp_size, tp_rank = _get_size_and_rank(tp_group)
    return CheckpointRanks(tp_group, tp_size, tp_rank, _get_size_and_rank(dp_cp_group)[1])


def resolve_groups(
    tp_group: GroupLike | None,
    dp_cp_group: GroupLike | None,
    *,
    pp_group: GroupLike | None = None,
    model_sizes: tuple[int, int] | None = None,
    need_dp_cp: bool = True,
) -> tuple[GroupLike, GroupLike]:
    """Return both groups: the given one, else the default ProcessGroups', else size 1 if certain.

    ``model_sizes`` are the tp and pp sizes of a whole model. A size of 1 rules out a missing group.
    """
    default = get_default_process_groups() if tp_group is None or dp_cp_group is None else None
    if default is not None:
        tp_group = default.tp if tp_group is None else tp_group
        dp_cp_group = default.dp_cp if dp_cp_group is None else dp_cp_group
        pp_group = default.pp if pp_group is None else pp_group
    if tp_group is not None and dp_cp_group is not None:
        return tp_group, dp_cp_group
    world = world_size()
    # If the known groups fill the world, each unknown group can only have this rank in it.
    stages = model_sizes[1] if pp_group is None and model_sizes else get_pg_size(pp_group)
    model_ranks = get_pg_size(tp_group) * stages
    fills_world = world == 1 or model_ranks * get_pg_size(dp_cp_group) == world
    if tp_group is None:
        if not fills_world and (model_sizes is None or model_sizes[0] > 1):
            raise _report_unknown_group("tp_group", "tp", world)
        tp_group = ONE_RANK
    if dp_cp_group is not None or fills_world or not need_dp_cp:
        return tp_group, ONE_RANK if dp_cp_group is None else dp_cp_group
    if model_sizes is None or model_ranks > 1:
        raise _report_unknown_group("dp_cp_group", "dp_cp", world)
    return tp_group, cast("dist.ProcessGroup", dist.group.WORLD)


def _get_size_and_rank(group: GroupLike) -> tuple[int, int]:
    member = as_process_group(group)
    return (1, 0) if member is None else (member.size(), member.rank())


def _report_unknown_group(name: str, field: str, world: int) -> UnknownGroupError:
    return UnknownGroupError(
        f"{name} is not given, there is no default ProcessGroups with a {field} group, and the "
        f"known groups do not fill the world of {world} ranks: a tensor could be written twice or "
        f"not at all. Pass {name}=..., metadata[{name!r}] or a pg_collection with {field}, or call "
        "set_default_process_groups(ProcessGroups.from_sizes(...))"
    )


def mesh_spans_world(mesh: DeviceMesh) -> bool:
    """Return whether a mesh has all ranks, so its placements describe every parallelism."""
    return is_distributed() and mesh.size() == dist.get_world_size()


def mesh_has_group(mesh: DeviceMesh, group: GroupLike | None) -> bool:
    """Return whether a mesh has all ranks of a group, so its placements cover the group."""
    if mesh_spans_world(mesh) or "tp" in (mesh.mesh_dim_names or ()):
        return True
    member = as_process_group(group)
    if not isinstance(member, dist.ProcessGroup):
        return False
    return set(group_ranks(member)) <= set(mesh.mesh.flatten().tolist())


def ensure_metadata_has_dp_cp_group(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of ``metadata`` that has the key ``dp_cp_group``.

    The caller's dict does not change, so no process group gets into a saved configuration. No
    communication.

    Args:
        metadata: The ``metadata`` argument of ``sharded_state_dict`` calls, or None.

    Returns:
        A new dict. If the key was missing, its value is the default ProcessGroups' ``dp_cp``, or
        None, which the builders resolve.

    Raises:
        TypeError: ``metadata`` is not a mapping.

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
