"""The dimensions of a mesh that an index works with, and its submeshes of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import reject_destroyed
from mcore.parallel.mesh import get_mesh_names, resolve_submesh


@dataclass(frozen=True)
class FSDPDims:
    """The names of the dimensions that an index works with; None where there is none."""

    shard: str
    outer: str | None
    tp: str | None

    @property
    def hybrid(self) -> tuple[str, str] | None:
        """The two data-parallel dimensions, outer first, or None without an outer one."""
        return None if self.outer is None else (self.outer, self.shard)


def dense_dims(mesh: DeviceMesh, shard: str | None, outer: str | None, tp: str | None) -> FSDPDims:
    """Return the dimensions of the dense mesh, or raise ValueError for one that it lacks."""
    _check_mesh("device_mesh", mesh)
    if shard is None:
        raise ValueError(
            "dp_shard_dim is None; pass the dimension that parameters are sharded over, one of: "
            f"{_known(mesh)}"
        )
    given = {"dp_shard_dim": shard, "dp_outer_dim": outer, "tp_dim": tp}
    present = {argument: name for argument, name in given.items() if name is not None}
    for argument, name in present.items():
        _check_dim(argument, name, "device_mesh", mesh)
    if len(set(present.values())) != len(present):
        raise ValueError(f"one dimension is given twice: {present}")
    _check_this_rank("device_mesh", mesh)
    return FSDPDims(shard, outer, tp)


def expert_dims(mesh: DeviceMesh, dense: FSDPDims) -> FSDPDims:
    """Return those of the dense dimensions that the expert mesh has; it needs ``shard``."""
    _check_mesh("expt_device_mesh", mesh)
    _check_dim("dp_shard_dim", dense.shard, "expt_device_mesh", mesh)
    _check_this_rank("expt_device_mesh", mesh)
    names = get_mesh_names(mesh)
    return FSDPDims(
        dense.shard,
        dense.outer if dense.outer in names else None,
        dense.tp if dense.tp in names else None,
    )


def register_submeshes(mesh: DeviceMesh, dims: FSDPDims) -> dict[tuple[str, ...], DeviceMesh]:
    """Slice every submesh that an index hands out, by its dimension names."""
    wanted = (
        (dims.tp,),
        (dims.outer, dims.shard, dims.tp),
        (dims.shard, dims.tp),
        (dims.outer, dims.shard),
        (dims.shard,),
    )
    library = {}
    for candidates in wanted:
        names = tuple(name for name in candidates if name is not None)
        if len(names) == len(candidates):
            library[names] = _submesh(mesh, names)
    return library


def _submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    try:
        return resolve_submesh(mesh, names)
    except ValueError as error:
        raise ValueError(
            f"{error}; make a mesh that has each of these as a separate dimension, for example "
            f"by _unflatten of a 1-D mesh into {names}"
        ) from error


def _check_mesh(argument: str, mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{argument} must be a DeviceMesh, got {type(mesh).__name__}")
    reject_destroyed(mesh)


def _check_dim(argument: str, name: str, mesh_argument: str, mesh: DeviceMesh) -> None:
    if name in (mesh.mesh_dim_names or ()) or name in get_mesh_names(mesh):
        return
    raise ValueError(
        f"{argument} {name!r} is not a dimension of {mesh_argument} {mesh}, which has: "
        f"{_known(mesh)}; name one of these, or make a mesh that has it as a separate dimension "
        "(_unflatten)"
    )


def _known(mesh: DeviceMesh) -> str:
    return ", ".join(get_mesh_names(mesh)) or "no names (give mesh_dim_names when making the mesh)"


def _check_this_rank(argument: str, mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the {argument} {mesh}; only its members can make "
            "an index"
        )
