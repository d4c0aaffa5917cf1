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


@dataclass(frozen=True)
class FSDPDims:
    """The names of the dimensions that an index uses. None if there is none."""

    shard: str
    outer: str | None
    tp: str | None

    @property
    def hybrid(self) -> tuple[str, str] | None:
        """The two data-parallel dimensions, outer first, or None without an outer dimension."""
        return None if self.outer is None else (self.outer, self.shard)


@final
@dataclass(frozen=True)
class MeshGroups:
    """The submeshes, by dimension names, and the groups of one mesh. None if there is none."""

    mesh: DeviceMesh
    submeshes: dict[tuple[str, ...], DeviceMesh]
    shard_group: dist.ProcessGroup
    outer_group: dist.ProcessGroup | None
    hybrid_group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None

    @property
    def lacks_hybrid_group(self) -> bool:
        """Whether there are both data-parallel dimensions, but no group of both."""
        return self.outer_group is not None and self.hybrid_group is None


def is_from_world_mesh(mesh: object) -> bool:
    """Return whether the meshes of all ranks are slices of one mesh of the whole world."""
    # Ranks outside a mesh cannot flatten it, and would count their later groups differently.
    return isinstance(mesh, DeviceMesh) and root_mesh(mesh).size() == dist.get_world_size()


def agree_on_groups(
    resolve: Callable[[], tuple[MeshGroups, MeshGroups | None]],
    arguments: Mapping[str, object],
    hybrid: tuple[str, str],
) -> tuple[MeshGroups, MeshGroups | None]:
    """Resolve the groups, and make the expert hybrid group if any rank lacks it.
    Collective on the world group: one all-reduce (MAX of 64 int64), and a creation if necessary.
    An error of one rank is raised on all.
    """
    error, resolved = None, None
    try:
        resolved = resolve()
    except Exception as own_error:
        error = own_error
    expert = None if resolved is None else resolved[1]
    is_lacking = expert is not None and expert.lacks_hybrid_group
    facts = ", ".join(f"{name}={value}" for name, value in arguments.items())
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    [any_lacks] = max_or_raise([is_lacking], error, world, facts)
    dense, expert = cast("tuple[MeshGroups, MeshGroups | None]", resolved)
    if not any_lacks:
        return dense, expert
    # All ranks make the group, also those that have it: a creation counts on every rank.
    expert = cast("MeshGroups", expert)
    made = create_hybrid_group(expert.submeshes[hybrid])
    return dense, replace(expert, hybrid_group=expert.hybrid_group or made)


def resolve_dense_dims(
    mesh: DeviceMesh, shard: str | None, outer: str | None, tp: str | None
) -> FSDPDims:
    """Return the dimensions of the dense mesh. ValueError for a dimension that it lacks."""
    _check_mesh("device_mesh", mesh)
    if shard is None:
        raise ValueError(
            "dp_shard_dim is None: pass the dimension that parameters are sharded over, one of: "
            f"{_list_dims(mesh)}"
        )
    given = {"dp_shard_dim": shard, "dp_outer_dim": outer, "tp_dim": tp}
    present = {argument: name for argument, name in given.items() if name is not None}
    for argument, name in present.items():
        _check_dim(argument, name, "device_mesh", mesh)
    if len(set(present.values())) != len(present):
        raise ValueError(f"one dimension is given twice: {present}. Name each dimension once")
    _check_this_rank("device_mesh", mesh)
    return FSDPDims(shard, outer, tp)


def resolve_dense_groups(
    mesh: DeviceMesh, dims: FSDPDims, hybrid_group: GroupLike | None, gather_group: GroupLike | None
) -> MeshGroups:
    """Slice the dense mesh and check the given groups against it. No communication."""
    submeshes = slice_submeshes(mesh, dims)
    shard_group = submeshes[(dims.shard,)].get_group()
    hybrid = _require_member("hybrid_fsdp_group", hybrid_group)
    outer_group = None
    if dims.hybrid is not None:
        check_hybrid_group("hybrid_fsdp_group", hybrid, submeshes[dims.hybrid])
        outer_group = submeshes[dims.hybrid].get_group(0)
    second = _require_member("fsdp_group_ag", gather_group)
    check_all_gather_group("fsdp_group_ag", second, shard_group)
    return MeshGroups(mesh, submeshes, shard_group, outer_group, hybrid, second)


def resolve_expert_groups(
    mesh: DeviceMesh,
    dense_dims: FSDPDims,
    dense: MeshGroups,
    hybrid_group: GroupLike | None,
    gather_group: GroupLike | None,
    can_create: bool,
) -> MeshGroups:
    """Slice the expert mesh and check the given groups against it. No communication.
    A missing hybrid group is an error unless it can be created afterwards.
    """
    _check_mesh("expt_device_mesh", mesh)
    _check_dim("dp_shard_dim", dense_dims.shard, "expt_device_mesh", mesh)
    _check_this_rank("expt_device_mesh", mesh)
    names = get_mesh_names(mesh)  # of the dense dimensions only shard must exist for experts
    dims = FSDPDims(
        dense_dims.shard,
        dense_dims.outer if dense_dims.outer in names else None,
        dense_dims.tp if dense_dims.tp in names else None,
    )
    submeshes = slice_submeshes(mesh, dims)
    shard_group = submeshes[(dims.shard,)].get_group()
    second = _require_member("expt_fsdp_group_ag", gather_group)
    check_all_gather_group("expt_fsdp_group_ag", second, shard_group)
    hybrid = _require_member("hybrid_fsdp_expt_group", hybrid_group)
    outer_group = None
    if dims.hybrid is not None:
        outer_group = submeshes[dims.hybrid].get_group(0)
        ranks = submeshes[dims.hybrid].mesh.flatten().tolist()
        if hybrid is not None:
            check_hybrid_group("hybrid_fsdp_expt_group", hybrid, submeshes[dims.hybrid])
        elif dense.hybrid_group is not None and group_ranks(dense.hybrid_group) == ranks:
            hybrid = dense.hybrid_group
        elif not can_create:
            raise ValueError(
                f"cannot make a group of (dp_outer_dim, dp_shard_dim) of {mesh}, which is not of "
                "the whole world: pass hybrid_fsdp_expt_group"
            )
    elif dense_dims.hybrid is not None:
        check_rows_of_hybrid_group(hybrid, shard_group)
    return MeshGroups(mesh, submeshes, shard_group, outer_group, hybrid, second)


def slice_submeshes(mesh: DeviceMesh, dims: FSDPDims) -> dict[tuple[str, ...], DeviceMesh]:
    """Slice every submesh that an index returns, by its dimension names."""
    wanted = (
        (dims.tp,),
        (dims.outer, dims.shard, dims.tp),
        (dims.shard, dims.tp),
        (dims.outer, dims.shard),
        (dims.shard,),
    )
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
    if name in (mesh.mesh_dim_names or ()) or name in get_mesh_names(mesh):
        return
    raise ValueError(
        f"{argument} {name!r} is not a dimension of {mesh_argument} {mesh}, which has: "
        f"{_list_dims(mesh)}. Name one of these, or make a mesh that has it as a separate "
        "dimension (_unflatten)"
    )


def _list_dims(mesh: DeviceMesh) -> str:
    return ", ".join(get_mesh_names(mesh)) or "no names (pass mesh_dim_names when making the mesh)"


def _check_this_rank(argument: str, mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the {argument} {mesh}: only its members can make "
            "an index"
        )


def _require_member(argument: str, group: GroupLike | None) -> dist.ProcessGroup | None:
    try:
        return as_process_group(group)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from None


def check_hybrid_group(argument: str, group: dist.ProcessGroup | None, hybrid: DeviceMesh) -> None:
    """Raise ValueError unless a group has the ranks of ``(outer, shard)``, in outer-major order."""
    outer, shard = hybrid.mesh_dim_names or ("", "")
    expected = hybrid.mesh.flatten().tolist()
    how = _explain_creation(expected, outer, shard)
    if group is None:
        raise ValueError(f"dp_outer_dim {outer!r} needs {argument}, which is None: {how}")
    found = group_ranks(group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but ({outer}, {shard}) of the mesh has "
            f"{ranks_text(expected)} in outer-major order: {how}"
        )


def _explain_creation(ranks: list[int], outer: str, shard: str) -> str:
    how = _FLATTEN
    if ranks != sorted(ranks):
        how = _KEEP_ORDER if can_order_ranks() else _ASCEND
    return how.format(outer=outer, shard=shard)


def check_rows_of_hybrid_group(
    group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError unless the group of this rank's shards is a row of the expert hybrid group.
    The expert mesh lacks the outer dimension, so no more can be checked.
    """
    if group is None:
        raise ValueError(
            "expt_device_mesh lacks dp_outer_dim, so the ranks of both data-parallel "
            "dimensions are not known: pass hybrid_fsdp_expt_group"
        )
    found, row = group_ranks(group), group_ranks(shard_group)
    start = group.rank() // len(row) * len(row)
    if len(found) % len(row) or found[start : start + len(row)] != row:
        raise ValueError(
            f"hybrid_fsdp_expt_group has {ranks_text(found)}, but in outer-major order the "
            f"{len(row)} from place {start} on must be the ranks of dp_shard_dim in "
            f"expt_device_mesh: {ranks_text(row)}"
        )


def check_all_gather_group(
    argument: str, group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError if a group is given without the ranks of the shards' group in order."""
    if group is None:
        return
    found, expected = group_ranks(group), group_ranks(shard_group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but dp_shard_dim has "
            f"{ranks_text(expected)}: pass a second group of the same ranks, or None"
        )


def create_hybrid_group(hybrid: DeviceMesh) -> dist.ProcessGroup:
    """Return a new group over ``(outer, shard)`` of the expert mesh, the same at every call.
    Collective on the world group at the first call.
    """
    ranks = hybrid.mesh.flatten().tolist()
    flat = flatten_mesh(hybrid, "_".join(("expert", *(hybrid.mesh_dim_names or ()))))
    if flat is None or group_ranks(flat.get_group()) != ranks:
        how = _explain_creation(ranks, *(hybrid.mesh_dim_names or ("", "")))
        raise ValueError(
            f"cannot make a group of {ranks_text(ranks)} of {hybrid}: pass hybrid_fsdp_expt_group. "
            f"To make it, {how}"
        )
    return flat.get_group()
