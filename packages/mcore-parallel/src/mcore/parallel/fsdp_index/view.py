"""The submeshes and groups of one mesh, checked against it and, for experts, made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.agreement import max_or_raise
from mcore.parallel.fsdp_index.dimensions import FSDPDims, expert_dims, register_submeshes
from mcore.parallel.groups import GroupLike, as_process_group, group_ranks
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
class FSDPView:
    """The submeshes, by dimension names, and the groups of one mesh; None where there is none."""

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


def covers_world(mesh: object) -> bool:
    """Return whether the meshes of all ranks are slices of one mesh of the whole world."""
    # Ranks outside a mesh cannot flatten it, and would count their later groups differently.
    return isinstance(mesh, DeviceMesh) and root_mesh(mesh).size() == dist.get_world_size()


def agreed_views(
    make: Callable[[], tuple[FSDPView, FSDPView | None]],
    arguments: Mapping[str, object],
    hybrid: tuple[str, str],
) -> tuple[FSDPView, FSDPView | None]:
    """Make the views, and the expert hybrid group where a rank lacks it; raise on all ranks alike.
    Collective on the world group: one all-reduce (MAX of 64 int64), and a creation if need be.
    """
    error, views = None, None
    try:
        views = make()
    except Exception as own_error:
        error = own_error
    is_lacking = views is not None and views[1] is not None and views[1].lacks_hybrid_group
    facts = ", ".join(f"{name}={value}" for name, value in arguments.items())
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    [any_lacks] = max_or_raise([is_lacking], error, world, facts)
    if not any_lacks:
        return cast("tuple[FSDPView, FSDPView | None]", views)
    dense, expert = cast("tuple[FSDPView, FSDPView]", views)
    made = created_hybrid_group(expert.submeshes[hybrid])
    return dense, replace(expert, hybrid_group=expert.hybrid_group or made)


def dense_view(
    mesh: DeviceMesh, dims: FSDPDims, hybrid_group: GroupLike | None, gather_group: GroupLike | None
) -> FSDPView:
    """Slice the dense mesh and check the given groups against it; no communication."""
    submeshes = register_submeshes(mesh, dims)
    shard_group = submeshes[(dims.shard,)].get_group()
    hybrid = member_of("hybrid_fsdp_group", hybrid_group)
    outer_group = None
    if dims.hybrid is not None:
        check_hybrid_group("hybrid_fsdp_group", hybrid, submeshes[dims.hybrid])
        outer_group = submeshes[dims.hybrid].get_group(0)
    second = member_of("fsdp_group_ag", gather_group)
    check_all_gather_group("fsdp_group_ag", second, shard_group)
    return FSDPView(mesh, submeshes, shard_group, outer_group, hybrid, second)


def expert_view(
    mesh: DeviceMesh,
    dense_dims: FSDPDims,
    dense: FSDPView,
    hybrid_group: GroupLike | None,
    gather_group: GroupLike | None,
    can_create: bool,
) -> FSDPView:
    """Slice the expert mesh and check the given groups against it; no communication.
    A hybrid group that is missing is an error unless it can be created afterwards.
    """
    dims = expert_dims(mesh, dense_dims)
    submeshes = register_submeshes(mesh, dims)
    shard_group = submeshes[(dims.shard,)].get_group()
    second = member_of("expt_fsdp_group_ag", gather_group)
    check_all_gather_group("expt_fsdp_group_ag", second, shard_group)
    hybrid = member_of("hybrid_fsdp_expt_group", hybrid_group)
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
    return FSDPView(mesh, submeshes, shard_group, outer_group, hybrid, second)


def member_of(argument: str, group: GroupLike | None) -> dist.ProcessGroup | None:
    """Return what was given for an argument as a process group that this rank is in."""
    try:
        return as_process_group(group)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from None


def check_hybrid_group(argument: str, group: dist.ProcessGroup | None, hybrid: DeviceMesh) -> None:
    """Raise ValueError unless a group has the ranks of ``(outer, shard)``, in outer-major order."""
    outer, shard = hybrid.mesh_dim_names or ("", "")
    expected = hybrid.mesh.flatten().tolist()
    how = _how_to_make(expected, outer, shard)
    if group is None:
        raise ValueError(f"dp_outer_dim {outer!r} needs {argument}, which is None: {how}")
    found = group_ranks(group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but ({outer}, {shard}) of the mesh has "
            f"{ranks_text(expected)} in outer-major order: {how}"
        )


def _how_to_make(ranks: list[int], outer: str, shard: str) -> str:
    how = _FLATTEN
    if ranks != sorted(ranks):
        how = _KEEP_ORDER if can_order_ranks() else _ASCEND
    return how.format(outer=outer, shard=shard)


def check_rows_of_hybrid_group(
    group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError unless the group of this rank's shards is a row of the expert hybrid group.
    That is all that can be checked where the expert mesh lacks the outer dimension.
    """
    if group is None:
        raise ValueError(
            "expt_device_mesh lacks dp_outer_dim, so that the ranks of both data-parallel "
            "dimensions are not known: pass hybrid_fsdp_expt_group"
        )
    found, row = group_ranks(group), group_ranks(shard_group)
    start = group.rank() // len(row) * len(row)
    if len(found) % len(row) or found[start : start + len(row)] != row:
        raise ValueError(
            f"hybrid_fsdp_expt_group has {ranks_text(found)}, but in outer-major order the "
            f"{len(row)} from place {start} on must be those of dp_shard_dim in expt_device_mesh: "
            f"{ranks_text(row)}"
        )


def check_all_gather_group(
    argument: str, group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError unless a group, where given, has the ranks of the shards' group in order."""
    if group is None:
        return
    found, expected = group_ranks(group), group_ranks(shard_group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but dp_shard_dim has "
            f"{ranks_text(expected)}: pass a second group of the same ranks, or None"
        )


def created_hybrid_group(hybrid: DeviceMesh) -> dist.ProcessGroup:
    """Return a new group over ``(outer, shard)`` of the expert mesh, the same at every call.
    Collective on the world group the first time.
    """
    ranks = hybrid.mesh.flatten().tolist()
    flat = flatten_mesh(hybrid, "_".join(("expert", *(hybrid.mesh_dim_names or ()))))
    if flat is None or group_ranks(flat.get_group()) != ranks:
        how = _how_to_make(ranks, *(hybrid.mesh_dim_names or ("", "")))
        raise ValueError(
            f"cannot make a group of {ranks_text(ranks)} of {hybrid}: pass hybrid_fsdp_expt_group; "
            + how
        )
    return flat.get_group()
