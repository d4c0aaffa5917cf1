"""The groups of an FSDP index: held against the ranks of its meshes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mcore.parallel.groups import as_process_group, group_ranks
from mcore.parallel.shortened import ranks_text
from mcore.parallel.torch_compat import flatten_mesh, root_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mcore.parallel.groups import GroupLike

__all__ = [
    "check_all_gather_group",
    "check_hybrid_group",
    "check_rows_of_hybrid_group",
    "expert_hybrid_group",
    "member_of",
]

_HOW_TO_MAKE = (
    "flatten the two dimensions, keep the result and pass its group: "
    "mesh[{outer!r}, {shard!r}]._flatten(...).get_group(), or make it with "
    "dist.new_group(ranks, sort_ranks=False) for each outer-major list of ranks"
)


def member_of(argument: str, group: GroupLike | None) -> dist.ProcessGroup | None:
    """Return what was given for an argument as a process group that this rank is in.

    No communication.

    Raises:
        ValueError: This rank is not a member.
        TypeError: It is no group.
    """
    try:
        return as_process_group(group)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from None


def check_hybrid_group(argument: str, group: dist.ProcessGroup | None, hybrid: DeviceMesh) -> None:
    """Raise ValueError unless a group has the ranks of ``(outer, shard)``, in outer-major order.

    No communication.

    Args:
        argument: What the group was given as.
        group: The group, or None where it was not given.
        hybrid: The mesh of the two dimensions, outer first.
    """
    outer, shard = hybrid.mesh_dim_names or ("", "")
    how = _HOW_TO_MAKE.format(outer=outer, shard=shard)
    if group is None:
        raise ValueError(f"dp_outer_dim {outer!r} needs {argument}, which is None: {how}")
    expected = hybrid.mesh.flatten().tolist()
    found = group_ranks(group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but ({outer}, {shard}) of the mesh has "
            f"{ranks_text(expected)} in outer-major order: {how}"
        )


def check_rows_of_hybrid_group(
    group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError unless the shards' group of this rank is a row of the expert hybrid group.

    That is what can be said of an outer-major group where the expert mesh lacks the outer
    dimension. No communication.
    """
    if group is None:
        raise ValueError(
            "expt_device_mesh lacks dp_outer_dim, so that the ranks of both data-parallel "
            "dimensions are not known: give hybrid_fsdp_expt_group"
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
    """Raise ValueError unless a group, where given, has the ranks of the shards' group in order.

    No communication.
    """
    if group is None:
        return
    found, expected = group_ranks(group), group_ranks(shard_group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but dp_shard_dim has "
            f"{ranks_text(expected)}: give a second group of the same ranks, or None"
        )


def expert_hybrid_group(
    given: dist.ProcessGroup | None, hybrid: DeviceMesh, dense: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    """Return a group over ``(outer, shard)`` of the expert mesh: given, of the dense mesh, or new.

    Collective on the world group when a new one is needed for the first time.

    Args:
        given: What the caller gave, or None; it is checked.
        hybrid: The mesh of the two dimensions, outer first.
        dense: The hybrid group of the dense mesh, which serves where the ranks are the same.

    Raises:
        ValueError: The given group has other ranks; or none was given, and the mesh is over a part
            of the world or torch cannot flatten it.
    """
    argument = "hybrid_fsdp_expt_group"
    if given is not None:
        check_hybrid_group(argument, given, hybrid)
        return given
    ranks = hybrid.mesh.flatten().tolist()
    if dense is not None and group_ranks(dense) == ranks:
        return dense
    # Ranks outside the mesh cannot flatten it, and would count their later groups differently.
    covers_world = root_mesh(hybrid).size() == dist.get_world_size()
    name = "_".join(("expert", *(hybrid.mesh_dim_names or ())))
    flat = flatten_mesh(hybrid, name) if covers_world else None
    if flat is None or group_ranks(flat.get_group()) != ranks:
        raise ValueError(f"cannot make a group of {ranks_text(ranks)} of {hybrid}: give {argument}")
    return flat.get_group()
