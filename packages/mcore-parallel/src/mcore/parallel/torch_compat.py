"""The one place that knows torch names which differ between versions or are private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_distributed() -> bool:
    """Say whether torch.distributed is built in and initialised in this process.

    Returns:
        True between ``init_process_group`` and ``destroy_process_group``, else False. Never raises.

    Example:
        >>> is_distributed()
        False
    """
    return dist.is_available() and dist.is_initialized()


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Concatenate every rank's tensor along dimension 0 into ``output``, without a warning.

    The collective is all-gather over ``group``; every rank of the group calls it and gets the
    result. torch renamed ``all_gather_into_tensor`` and warns about the old name: the name is
    looked up at each call.

    Args:
        output: ``[size * n, ...]``, contiguous, filled in the group's rank order.
        input: ``[n, ...]``, of the same dtype and device, contiguous.
        group: The group to gather over; None is the world group, as in torch.distributed.
        async_op: Return at once; ``output`` is valid after ``wait()`` of the returned handle.

    Returns:
        The handle when ``async_op`` is True, else None.

    Raises:
        ValueError: torch.distributed is not initialised (from torch).

    Example:
        >>> import torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> out = torch.empty(2)
        >>> all_gather_single(out, torch.tensor([1.0, 2.0]), dist.group.WORLD)
        >>> out
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    gather = _collective("all_gather_single", "all_gather_into_tensor")
    work: dist.Work | None = gather(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum ``input`` over the ranks and leave this rank's chunk of dimension 0 in ``output``.

    The collective is reduce-scatter (sum) over ``group``; every rank of the group calls it and
    gets its own chunk. The torch name is looked up at each call, as for
    :func:`all_gather_single`.

    Args:
        output: ``[n, ...]``, contiguous.
        input: ``[size * n, ...]``, of the same dtype and device, contiguous; chunk ``i`` goes to
            the group's rank ``i``.
        group: The group to reduce over; None is the world group, as in torch.distributed.
        async_op: Return at once; ``output`` is valid after ``wait()`` of the returned handle.

    Returns:
        The handle when ``async_op`` is True, else None.

    Raises:
        ValueError: torch.distributed is not initialised (from torch).

    Example:
        >>> import torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> out = torch.empty(2)
        >>> reduce_scatter_single(out, torch.tensor([1.0, 2.0]), dist.group.WORLD)
        >>> out
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
    work: dist.Work | None = scatter(output, input, group=group, async_op=async_op)
    return work


def _collective(name: str, old_name: str) -> Any:
    """Return a function of torch.distributed under its new name where this torch has it."""
    return getattr(dist, name if hasattr(dist, name) else old_name)


def flatten_mesh_dims(mesh: DeviceMesh, dims: Sequence[str], name: str) -> DeviceMesh | None:
    """Flatten some dimensions of a mesh into a named 1-D mesh, where torch can.

    Collective on the world group the first time a flattening is asked for. torch keeps the
    flattened mesh with the root mesh and gives the same object for the same dimensions again.

    Args:
        mesh: A mesh with dimension names.
        dims: Two or more of its dimension names, in mesh order.
        name: The name of the flattened dimension.

    Returns:
        The 1-D mesh, or None when this torch cannot flatten, or ``name`` stands for something
        else in the root mesh.
    """
    return flatten_mesh(mesh[tuple(dims)], name)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """Flatten all dimensions of a mesh into a named 1-D mesh, where torch can.

    Collective on the world group the first time, as :func:`flatten_mesh_dims`, which flattens some
    of the dimensions.

    Args:
        mesh: A mesh with dimension names.
        name: The name of the flattened dimension.

    Returns:
        The 1-D mesh, or None when this torch cannot flatten, or ``name`` stands for something
        else in the root mesh.
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
    """Return the mesh that a mesh was sliced, unflattened or joined from, itself if from none.

    No communication.
    """
    find: Any = getattr(mesh, "_get_root_mesh", None)
    if find is None:
        return mesh
    root: DeviceMesh = find()
    return root


def flattened_meshes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the flattened meshes that torch keeps with the root mesh, by name.

    No communication. They belong to the whole family of meshes with this root: one that is found
    here may lie outside ``mesh``.

    Returns:
        A new dict in the order of creation; empty where this torch keeps none.
    """
    return dict(getattr(root_mesh(mesh), "_flatten_mapping", None) or {})


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Make one mesh of the dimensions of several, in the order given, with their groups.

    No communication, no new group.

    Args:
        meshes: At least one; all with dimension names, of one root, with disjoint dimensions.

    Returns:
        The joined mesh.

    Raises:
        RuntimeError: The meshes overlap or have different roots (from torch), or this torch
            cannot join meshes.
    """
    join: Any = getattr(DeviceMesh, "_concatenate", None)
    if join is None:
        raise RuntimeError("this version of torch cannot join meshes")
    joined: DeviceMesh = join(list(meshes))
    return joined


def mesh_from_groups(
    groups: Sequence[dist.ProcessGroup],
    device_type: str,
    mesh: torch.Tensor,
    dim_names: Sequence[str],
) -> DeviceMesh:
    """Build a mesh over groups that exist, creating none.

    Args:
        groups: One group for each dimension, each containing this rank; at least two.
        device_type: The kind of device the mesh is for, such as ``"cpu"``.
        mesh: The global ranks, int, one dimension for each group.
        dim_names: The name of each dimension.

    Returns:
        The mesh.
    """
    return DeviceMesh.from_group(
        list(groups), device_type, mesh=mesh, mesh_dim_names=tuple(dim_names)
    )


METADATA_FILE = ".metadata"

_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
METADATA_GLOBALS = frozenset(
    {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES}
    | {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)
"""Module and name of everything a ``.metadata`` file may refer to, besides dtypes and paths."""


def dtensor_chunk(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of this rank's part of a DTensor, as torch's checkpoints see it."""
    [chunk] = cast("Any", tensor).__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a strided shard (FSDP2 over tensor parallelism), else None."""
    return cast("int | None", getattr(placement, "split_factor", None))


def file_part(name: str, offset: int, length: int) -> Any:
    """Return how an index says in which bytes of which file something is."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)
