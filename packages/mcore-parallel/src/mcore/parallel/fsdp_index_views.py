"""What an FSDP index knows of one mesh, the dense or the expert one: its submeshes and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore.parallel.fsdp_index_groups import (
    check_all_gather_group,
    check_hybrid_group,
    check_rows_of_hybrid_group,
    expert_hybrid_group,
    member_of,
)
from mcore.parallel.fsdp_index_meshes import FSDPDims, expert_dims, register_submeshes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from mcore.parallel.groups import GroupLike

__all__ = ["FSDPView", "dense_view", "expert_view"]


@dataclass(frozen=True)
class FSDPView:
    """The submeshes and groups of one mesh.

    Attributes:
        mesh: The mesh.
        submeshes: The registered submeshes by dimension names.
        shard_group: The group of the shard dimension.
        outer_group: The group of the outer dimension, or None where the mesh has none.
        hybrid_group: The group of both, or None.
        gather_group: A second group with the ranks of ``shard_group``, or None.
    """

    mesh: DeviceMesh
    submeshes: dict[tuple[str, ...], DeviceMesh]
    shard_group: ProcessGroup
    outer_group: ProcessGroup | None
    hybrid_group: ProcessGroup | None
    gather_group: ProcessGroup | None


def dense_view(
    mesh: DeviceMesh, dims: FSDPDims, hybrid_group: GroupLike | None, gather_group: GroupLike | None
) -> FSDPView:
    """Slice the dense mesh and hold the given groups against it; no communication."""
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
) -> FSDPView:
    """Slice the expert mesh and hold the given groups against it.

    Collective on the world group where a hybrid group is missing and no group has its ranks.
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
        hybrid = expert_hybrid_group(hybrid, submeshes[dims.hybrid], dense.hybrid_group)
    elif dense_dims.hybrid is not None:
        check_rows_of_hybrid_group(hybrid, shard_group)
    return FSDPView(mesh, submeshes, shard_group, outer_group, hybrid, second)
