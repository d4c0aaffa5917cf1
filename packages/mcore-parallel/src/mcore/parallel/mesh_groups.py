"""The dimensions, submeshes and groups of one mesh, checked against it and, for experts, made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast, final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.agreement import max_or_raise
from mcore.parallel.groups import GroupLike, as_process_group, group_ranks, reject_destroyed
from mcore.parallel.mesh import get_mesh_names, resolve_submesh
from mcore.parallel.shortened import ranks_text
from mcore.parallel.torch_compat import can_order_ranks, flatten_mesh, root_mesh

_FLATTEN = (
    "flatten the two dimensions, keep the result and pass its group: "
    "mesh[{outer!r}, {shard!r}]._flatten(...).get_group(), or make it with "
    "dist.new_group(ranks) for each outer-major list of ranks"
)
_KEEP_ORDER = (
    "make it with dist.new_group(ranks, sort_ranks=False) for each outer-major list of ranks"
)
_ASCEND = (
    "this version of torch sorts the ranks of every group, so make a mesh whose ranks ascend, "
    "with {outer!r} before {shard!r}"
)


@final
@dataclass(frozen=True)
class MeshGroups:
    """The submeshes, by dimension names, and the groups of one mesh. None if there is none."""

    mesh: DeviceMesh
    submeshes: dict[tuple[str, ...], DeviceMesh]
    shard_group: dist.ProcessGroup
    hybrid_mesh: DeviceMesh | None  # of both data-parallel dimensions, outer first
    hybrid_group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None

    @property
    def outer_group(self) -> dist.ProcessGroup | None:
        """The group of the outer data-parallel dimension."""
        return None if self.hybrid_mesh is None else self.hybrid_mesh.get_group(0)


def is_from_world_mesh(mesh: object) -> bool:
    """Return whether the meshes of all ranks are slices of one mesh of the whole world."""
    # Ranks outside a mesh cannot flatten it, and would count their later groups differently.
    return isinstance(mesh, DeviceMesh) and root_mesh(mesh).size() == dist.get_world_size()


def agree_on_groups(
    resolve: Callable[[], tuple[MeshGroups, MeshGroups | None]], arguments: Mapping[str, object]
) -> tuple[MeshGroups, MeshGroups | None]:
    """Resolve the groups, and make the expert hybrid group if any rank lacks it.
    Collective on the world group: one all-reduce (MAX of 64 int64), and a creation if necessary.
    An error of one rank is raised on all.
    """
    failed, resolved = list[Exception](), None
    try:
        resolved = resolve()
    except Exception as error:
        failed.append(error)
    expert = None if resolved is None else resolved[1]
    hybrid = None if expert is None else expert.hybrid_mesh
    is_lacking = expert is not None and hybrid is not None and expert.hybrid_group is None
    facts = ", ".join(f"{name}={value}" for name, value in arguments.items())
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    [any_lacks] = max_or_raise([is_lacking], failed, world, facts)
    dense, expert = cast("tuple[MeshGroups, MeshGroups | None]", resolved)
    if not any_lacks:
        return dense, expert
    # All ranks make the group, also those that have it: a creation counts on every rank.
    expert, hybrid = cast("MeshGroups", expert), cast("DeviceMesh", hybrid)
    ranks = hybrid.mesh.flatten().tolist()
    # Flattening returns the same group at every call.
    flat = flatten_mesh(hybrid, "_".join(("expert", *(hybrid.mesh_dim_names or ()))))
    if flat is None or group_ranks(flat.get_group()) != ranks:
        raise ValueError(
            f"cannot make a group of {ranks_text(ranks)} of {hybrid}: pass hybrid_fsdp_expt_group. "
            f"To make it, {_explain_creation(hybrid)}"
        )
    return dense, replace(expert, hybrid_group=expert.hybrid_group or flat.get_group())


def resolve_dense_groups(
    mesh: DeviceMesh,
    dims: Mapping[str, str | None],
    hybrid_group: GroupLike | None,
    gather_group: GroupLike | None,
) -> MeshGroups:
    """Slice the dense mesh and check names and given groups against it. No communication.
    The names of the dimensions are by argument: ``dp_shard_dim``, ``dp_outer_dim``, ``tp_dim``.
    """
    _check_mesh("device_mesh", mesh)
    if dims["dp_shard_dim"] is None:
        raise ValueError(
            "dp_shard_dim is None: pass the dimension that parameters are sharded over, one of: "
            f"{_list_dims(mesh)}"
        )
    present = {argument: name for argument, name in dims.items() if name is not None}
    for argument, name in present.items():
        _check_dim(argument, name, "device_mesh", mesh)
    if len(set(present.values())) != len(present):
        raise ValueError(f"one dimension is given twice: {present}. Name each dimension once")
    given = {"hybrid_fsdp_group": hybrid_group, "fsdp_group_ag": gather_group}
    groups = _resolve_groups("device_mesh", mesh, dims, given)
    if groups.hybrid_mesh is not None and groups.hybrid_group is None:
        raise ValueError(
            f"dp_outer_dim {present['dp_outer_dim']!r} needs hybrid_fsdp_group, which is None: "
            f"{_explain_creation(groups.hybrid_mesh)}"
        )
    return groups


def resolve_expert_groups(
    mesh: DeviceMesh,
    dims: Mapping[str, str | None],
    dense: MeshGroups,
    hybrid_group: GroupLike | None,
    gather_group: GroupLike | None,
    can_create: bool,
) -> MeshGroups:
    """Slice the expert mesh and check the given groups against it. No communication.
    A missing hybrid group is an error unless it can be created afterwards.
    """
    _check_mesh("expt_device_mesh", mesh)
    _check_dim("dp_shard_dim", cast("str", dims["dp_shard_dim"]), "expt_device_mesh", mesh)
    names = get_mesh_names(mesh)  # of the dense dimensions only shard must exist for experts
    present = {argument: name if name in names else None for argument, name in dims.items()}
    given = {"hybrid_fsdp_expt_group": hybrid_group, "expt_fsdp_group_ag": gather_group}
    groups = _resolve_groups("expt_device_mesh", mesh, present, given)
    if dense.hybrid_mesh is not None and groups.hybrid_mesh is None:
        # The outer dimension is not known: only this rank's row of the hybrid group can be checked.
        if groups.hybrid_group is None:
            raise ValueError(
                "expt_device_mesh lacks dp_outer_dim, so the ranks of both data-parallel "
                "dimensions are not known: pass hybrid_fsdp_expt_group"
            )
        found, row = group_ranks(groups.hybrid_group), group_ranks(groups.shard_group)
        start = groups.hybrid_group.rank() // len(row) * len(row)
        if len(found) % len(row) or found[start : start + len(row)] != row:
            raise ValueError(
                f"hybrid_fsdp_expt_group has {ranks_text(found)}, but in outer-major order the "
                f"{len(row)} from place {start} on must be the ranks of dp_shard_dim in "
                f"expt_device_mesh: {ranks_text(row)}"
            )
    if groups.hybrid_mesh is None or groups.hybrid_group is not None:
        return groups
    ranks = groups.hybrid_mesh.mesh.flatten().tolist()
    if dense.hybrid_group is not None and group_ranks(dense.hybrid_group) == ranks:
        return replace(groups, hybrid_group=dense.hybrid_group)
    if not can_create:
        raise ValueError(
            f"cannot make a group of (dp_outer_dim, dp_shard_dim) of {mesh}, which is not of "
            "the whole world: pass hybrid_fsdp_expt_group"
        )
    return groups


def _resolve_groups(
    argument: str,
    mesh: DeviceMesh,
    dims: Mapping[str, str | None],
    given: Mapping[str, GroupLike | None],
) -> MeshGroups:
    """Slice a mesh that has the dimensions and check the hybrid and the all-gather group, given by
    argument, against it.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the {argument} {mesh}: only its members can make "
            "an index"
        )
    shard, outer = cast("str", dims["dp_shard_dim"]), dims["dp_outer_dim"]
    submeshes = _slice_submeshes(mesh, shard, outer, dims["tp_dim"])
    shard_group = submeshes[(shard,)].get_group()
    hybrid = None if outer is None else submeshes[outer, shard]
    groups = []
    for name, group in given.items():
        try:
            groups.append(as_process_group(group))
        except (ValueError, TypeError) as error:
            raise type(error)(f"{name}: {error}") from None
    (hybrid_name, gather_name), (hybrid_group, gather_group) = given, groups
    if hybrid is not None and hybrid_group is not None:
        expected = hybrid.mesh.flatten().tolist()
        if group_ranks(hybrid_group) != expected:
            raise ValueError(
                f"{hybrid_name} has {ranks_text(group_ranks(hybrid_group))}, but "
                f"({outer}, {shard}) of the mesh has {ranks_text(expected)} in "
                f"outer-major order: {_explain_creation(hybrid)}"
            )
    if gather_group is not None and group_ranks(gather_group) != group_ranks(shard_group):
        raise ValueError(
            f"{gather_name} has {ranks_text(group_ranks(gather_group))}, but dp_shard_dim has "
            f"{ranks_text(group_ranks(shard_group))}: pass a second group of the same ranks, or "
            "None"
        )
    return MeshGroups(mesh, submeshes, shard_group, hybrid, hybrid_group, gather_group)


def _slice_submeshes(
    mesh: DeviceMesh, shard: str, outer: str | None, tp: str | None
) -> dict[tuple[str, ...], DeviceMesh]:
    """Slice every submesh that an index returns, by its dimension names."""
    wanted = ((tp,), (outer, shard, tp), (shard, tp), (outer, shard), (shard,))
    submeshes = {}
    for candidates in wanted:
        names = tuple(name for name in candidates if name is not None)
        if len(names) < len(candidates):
            continue
        try:
            submeshes[names] = resolve_submesh(mesh, names)
        except ValueError as error:
            raise ValueError(
                f"{error}. Make a mesh that has each of these as a separate dimension, for example "
                f"by _unflatten of a 1-D mesh into {names}"
            ) from error
    return submeshes


def _check_mesh(argument: str, mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{argument} must be a DeviceMesh, got {type(mesh).__name__}")
    reject_destroyed(mesh)


def _check_dim(argument: str, name: str, mesh_argument: str, mesh: DeviceMesh) -> None:
    if name not in get_mesh_names(mesh):
        raise ValueError(
            f"{argument} {name!r} is not a dimension of {mesh_argument} {mesh}, which has: "
            f"{_list_dims(mesh)}. Name one of these, or make a mesh that has it as a separate "
            "dimension (_unflatten)"
        )


def _list_dims(mesh: DeviceMesh) -> str:
    return ", ".join(get_mesh_names(mesh)) or "no names (pass mesh_dim_names when making the mesh)"


def _explain_creation(hybrid: DeviceMesh) -> str:
    """Return how to make the group of ``(outer, shard)``."""
    outer, shard = hybrid.mesh_dim_names or ("", "")
    ranks, how = hybrid.mesh.flatten().tolist(), _FLATTEN
    if ranks != sorted(ranks):
        how = _KEEP_ORDER if can_order_ranks() else _ASCEND
    return how.format(outer=outer, shard=shard)
