"""Names of torch that differ between versions or are private."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

METADATA_FILE = ".metadata"


def is_distributed() -> bool:
    """Return whether torch.distributed is built in and initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def is_destroyed(group: object) -> bool:
    """Return whether torch made a group and has destroyed it since, alone or with its world."""
    if not dist.is_available() or type(group) is not dist.ProcessGroup:
        return False  # torch need not have registered groups of other types
    return group not in dist.distributed_c10d._world.pg_map


def has_destroyed_groups(mesh: DeviceMesh) -> bool:
    """Return whether a mesh had groups that are destroyed. New groups may have their names."""
    held = getattr(root_mesh(mesh), "_pg_registry", {})
    names = getattr(mesh, "_dim_group_names", ())
    if any(is_destroyed(held.get(name)) for name in names):
        return True
    known = set(dist.distributed_c10d._world.pg_names.values()) if names else set()
    return any(name is not None and name not in known for name in names)


def can_order_ranks() -> bool:
    """Return whether this torch has ``new_group(sort_ranks=False)``. Else all ranks ascend."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def can_count_groups() -> bool:
    """Return whether ``new_group`` does no more than count a group that this rank is not in.

    It does more in a world that is bound to a device, whose communicator all ranks split, if an
    environment variable requests a barrier, and if the world group makes the groups.
    """
    c10d, world = cast("Any", dist.distributed_c10d), cast("Any", dist.group.WORLD)
    return (
        hasattr(c10d._world, "group_count")
        and world.bound_device_id is None
        and not hasattr(world, "new_group")
        and not c10d._is_barrier_after_init()
        and not getattr(c10d, "_use_torchcomms_enabled", bool)()
    )


def count_groups(number: int) -> None:
    """Count groups of other ranks. torch names a group by the number of groups before it."""
    if number:
        dist.distributed_c10d._world.group_count += number


def job_timeout() -> timedelta | None:
    """Return the timeout of the world group, or None if its backend has none."""
    return group_timeout(cast("dist.ProcessGroup", dist.group.WORLD))


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's collectives, or None if its backend has none."""
    private = cast("Any", group)
    devices = sorted(private._device_types, key=lambda device: device.type == "cpu")
    for device in devices:  # an accelerator's backend first
        options = getattr(private._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Change the timeout of a group's collectives, if the backend has one."""
    if timeout is None or job_timeout() is None:
        return
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Concatenate every rank's tensor along dimension 0 into ``output``, without a warning.
    torch renamed ``all_gather_into_tensor``. None is the world group, as in torch.distributed.
    """
    gather = _find_collective("all_gather_single", "all_gather_into_tensor")
    work: dist.Work | None = gather(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Sum ``input`` over the ranks and leave this rank's chunk of dimension 0 in ``output``.
    torch renamed ``reduce_scatter_tensor``.
    """
    _find_collective("reduce_scatter_single", "reduce_scatter_tensor")(output, input, group=group)


def _find_collective(name: str, old_name: str) -> Any:
    """Return a function of torch.distributed under its new name if this torch has it."""
    return getattr(dist, name if hasattr(dist, name) else old_name)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """Flatten a mesh into a named 1-D mesh, or return None if torch cannot or the name is taken.
    Collective on the world group the first time. Later calls return the mesh that torch kept.
    """
    flatten = getattr(mesh, "_flatten", None)
    if flatten is None:
        return None
    try:
        flat: DeviceMesh = flatten(name)
    except ValueError:
        return None
    return flat


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was sliced, unflattened or joined from, else itself."""
    find: Any = getattr(mesh, "_get_root_mesh", None)
    if find is None:
        return mesh
    root: DeviceMesh = find()
    return root


def flattened_meshes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the flattened meshes that torch keeps with the root mesh, by name, oldest first."""
    return dict(getattr(root_mesh(mesh), "_flatten_mapping", None) or {})


def rank_rows(mesh: DeviceMesh) -> list[list[int]]:
    """List the ranks of a 1-D mesh and of all meshes parallel to it in the root mesh."""
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or rank_map is None:
        return [mesh.mesh.tolist()]
    rows: list[list[int]] = layout.remap_to_tensor(rank_map).tolist()
    return rows


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Make one mesh of the dimensions of several of one root, in this order, with their groups."""
    join: Any = getattr(DeviceMesh, "_concatenate", None)
    if join is None:
        raise RuntimeError("this version of torch cannot join meshes")
    joined: DeviceMesh = join(list(meshes))
    return joined


def file_part_type() -> Any:
    """Return the type by which an index locates bytes: of the file's name, offset and length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo
