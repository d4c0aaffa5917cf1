"""Dimension names of device meshes: lists of them, and slices by them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import reject_destroyed
from mcore.parallel.torch_compat import flattened_meshes, join_meshes, root_mesh


def get_mesh_names(
    device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False
) -> list[str]:
    """List the names of a mesh's dimensions and of the flattened dimensions that lie inside it.

    No communication. No mesh or group is made.

    Args:
        device_mesh: The mesh. None returns an empty list.
        only_submesh_dims: Leave the flattened dimensions out.

    Returns:
        The dimensions in mesh order (none for a mesh without names), then the flattened dimensions
        in the order of their creation. torch keeps flattened meshes with the root mesh. Only those
        with all ranks in ``device_mesh`` are listed.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> flat = mesh["dp", "tp"]._flatten("dp_tp")
        >>> get_mesh_names(mesh), get_mesh_names(mesh, only_submesh_dims=True)
        (['dp', 'tp', 'dp_tp'], ['dp', 'tp'])
        >>> dist.destroy_process_group()
    """
    if device_mesh is None:
        return []
    names = list(device_mesh.mesh_dim_names or ())
    if only_submesh_dims:
        return names
    flattened = flattened_meshes(device_mesh)
    inside = [
        n for n, flat in flattened.items() if n not in names and _is_inside(flat, device_mesh)
    ]
    return names + inside


def contains_submesh(
    device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None
) -> bool:
    """Return whether ``device_mesh[submesh_names]`` succeeds in this version of torch.

    No communication. No group is made. torch accepts some names only in mesh order, or only at the
    root mesh. :func:`resolve_submesh` accepts them in any order and at any mesh.

    Args:
        device_mesh: The mesh, or None.
        submesh_names: One name or several, or None.

    Returns:
        True if the slice can be made. False for None, without names and if a name is None.

    Example:
        >>> contains_submesh(None, "tp")
        False
    """
    names = _list_names(submesh_names)
    if device_mesh is None or not names or not all(isinstance(name, str) for name in names):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of slices that a later version refuses
            device_mesh[names]
    except Exception:  # whatever torch raises: the slice does not succeed
        return False
    return True


def resolve_submesh(device_mesh: DeviceMesh, names: str | Sequence[str]) -> DeviceMesh:
    """Slice a mesh by dimension names in any order, flattened ones included, without a warning.

    No communication and no new group: the submesh uses the existing groups. The result is
    ``device_mesh[names]`` if torch accepts the names, else the dimensions joined one by one.

    Args:
        device_mesh: Any mesh with dimension names, also a sliced or unflattened mesh.
        names: Dimensions of the mesh, or flattened dimensions inside it (see
            :func:`get_mesh_names`), all different and without overlap.

    Returns:
        The mesh of these dimensions in this order.

    Raises:
        ValueError: There is no name, a name is unknown or stands for two dimensions, dimensions
            overlap, this rank is outside the mesh, the mesh is of a destroyed world, or this torch
            cannot join these dimensions.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp", "dp"))
        >>> resolve_submesh(mesh, ("dp", "tp")).mesh_dim_names
        ('dp', 'tp')
        >>> dist.destroy_process_group()
    """
    wanted = _list_names(names)
    reject_destroyed(device_mesh)
    _check_names(device_mesh, wanted)
    if device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in {device_mesh}: only its members can slice it")
    dims = device_mesh.mesh_dim_names or ()
    try:
        if set(wanted) <= set(dims):
            with contextlib.suppress(KeyError):  # torch may accept these names in mesh order only
                return device_mesh[wanted]
        parts = [
            device_mesh[(name,)] if name in dims else flattened_meshes(device_mesh)[name]
            for name in wanted
        ]
        return parts[0] if len(parts) == 1 else join_meshes(parts)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"cannot take the submesh {wanted} of {device_mesh}: {error}") from error


def _list_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _check_names(mesh: DeviceMesh, wanted: tuple[str, ...]) -> None:
    if not wanted:
        raise ValueError(f"got no dimension names for a submesh of {mesh}: pass at least one")
    dims = list(mesh.mesh_dim_names or ())
    for name in wanted:
        if name not in dims and name not in (known := get_mesh_names(mesh)):
            raise ValueError(
                f"{mesh} has no dimension {name!r}. It has: {', '.join(known) or 'no names'}"
            )
        if dims.count(name) > 1 or wanted.count(name) > 1:
            raise ValueError(
                f"the name {name!r} appears twice in {wanted} or in {mesh}. Use each name once"
            )


def _is_inside(flat: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Return whether all ranks of a flattened mesh are ranks of a mesh of the same root."""
    if mesh is root_mesh(mesh):
        return True
    try:
        return bool(torch.isin(flat.mesh, mesh.mesh).all())
    except RuntimeError:  # this rank is in neither, and torch then has no ranks for the mesh
        return False
