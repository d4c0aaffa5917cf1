"""Local shards, full values and process groups of tensors that may be DTensors.

A DTensor can exist only once ``torch.distributed.tensor`` is imported, so nothing here imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

T = TypeVar("T")

# The types of nearly all tensors, recognised without looking at the imported modules.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _is_instance_if_imported(value: object, module: str, name: str) -> bool:
    imported = sys.modules.get(module)
    cls = getattr(imported, name, None)
    return cls is not None and isinstance(value, cls)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor, without importing ``torch.distributed.tensor``.

    Args:
        value: Any object.

    Returns:
        Whether it is a ``torch.distributed.tensor.DTensor``.

    Example:
        >>> is_dtensor(torch.ones(2))
        False
    """
    if type(value) in _PLAIN_TYPES:
        return False
    return _is_instance_if_imported(value, "torch.distributed.tensor", "DTensor")


def _wait_for_local_tensor(tensor: DTensor) -> torch.Tensor:
    # Not to_local(): it returns a new view of a parameter. The local tensor itself has no base.
    local = tensor._local_tensor
    if _is_instance_if_imported(
        local, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"
    ):
        return cast("torch.Tensor", cast(Any, local).wait())
    return local


def to_local_if_dtensor(tensor: T) -> T | torch.Tensor:
    """Return the local shard of a DTensor, and anything else unchanged.

    No communication: for a ``Partial`` placement the result is the local partial value. If the
    collective that computes the local value is still running, it waits for it.

    Args:
        tensor: A DTensor, or any other object (None too).

    Returns:
        For a DTensor the tensor that holds its shard: writing into it in place changes the
        DTensor, its ``requires_grad`` is kept, and no gradient flows back through the call.
        Else ``tensor`` itself.

    Example:
        >>> plain = torch.ones(2)
        >>> to_local_if_dtensor(plain) is plain
        True
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return _wait_for_local_tensor(tensor)


def get_full_tensor_if_necessary(tensor: T) -> T | torch.Tensor:
    """Return the local shard of a DTensor, or the full tensor if some rank's shard is empty.

    If every rank of the mesh holds at least one element (or the tensor has no elements), each rank
    gets its local shard without communication. Else each rank gets the full tensor by an
    all-gather over the mesh, which all its ranks must reach. All ranks choose the same way: the
    choice depends only on mesh shape, global shape and placements. Shards are assumed to be cut as
    by ``torch.chunk``.

    Args:
        tensor: A DTensor, or any other object.

    Returns:
        For a DTensor the local shard, which aliases it (loaders may write into it), or the full
        tensor, which is a copy. No gradient flows back through either. Else ``tensor`` itself.

    Example:
        >>> plain = torch.ones(2)
        >>> get_full_tensor_if_necessary(plain) is plain
        True
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        if tensor.numel() == 0 or every_rank_has_elements(
            tensor.shape, tensor.device_mesh.shape, tensor.placements
        ):
            return _wait_for_local_tensor(tensor)
        return tensor.full_tensor()


def get_data_parallel_group_if_dtensor(
    tensor: object,
    data_parallel_group: ProcessGroup | None = None,
    *,
    mesh_dim: int | str | None = None,
) -> ProcessGroup | None:
    """Return the process group over which a DTensor is distributed.

    No communication. For a plain tensor it returns None whatever group is passed, so a loop over a
    list of tensors can lose the group: use ``resolve_data_parallel_group`` for a list.

    Args:
        tensor: A DTensor, or any other object.
        data_parallel_group: The group that the tensor is expected to have, if any.
        mesh_dim: The index or name of the mesh dimension of the group. Required if the mesh has
            several dimensions.

    Returns:
        The group of the tensor's mesh, None for anything but a DTensor.

    Raises:
        ValueError: ``data_parallel_group`` has other ranks, or the mesh has more than one dimension
            and ``mesh_dim`` is not given, or it has no such dimension.

    Example:
        >>> get_data_parallel_group_if_dtensor(torch.ones(2)) is None
        True
    """
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    known: list[int | str] = [*range(mesh.ndim), *(mesh.mesh_dim_names or ())]
    if mesh_dim is None and mesh.ndim > 1:
        raise ValueError(
            f"the tensor is on a mesh of {mesh.ndim} dimensions, "
            f"{mesh.mesh_dim_names or known}: pass the data-parallel dimension as mesh_dim"
        )
    if mesh_dim is not None and mesh_dim not in known:
        raise ValueError(
            f"mesh_dim is {mesh_dim!r}, which is not a dimension of the tensor's mesh: "
            f"pass one of {known}"
        )
    group = mesh.get_group(mesh_dim)
    if data_parallel_group is None or data_parallel_group is group:
        return group
    # Two groups of the same ranks are equivalent: meshes create groups of their own.
    found_ranks = torch.distributed.get_process_group_ranks(group)
    expected_ranks = torch.distributed.get_process_group_ranks(data_parallel_group)
    if found_ranks != expected_ranks:
        raise ValueError(
            f"the tensor's data-parallel group has ranks {found_ranks}, but the group already in "
            f"use has ranks {expected_ranks}: all tensors must share one data-parallel group"
        )
    return group


def resolve_data_parallel_group(
    tensors: Iterable[object],
    data_parallel_group: ProcessGroup | None = None,
    *,
    mesh_dim: int | str | None = None,
) -> ProcessGroup | None:
    """Return the process group that all DTensors among the given tensors share.

    The result does not depend on the order, nor on plain tensors in between. No communication.

    Args:
        tensors: DTensors and other objects.
        data_parallel_group: The group that they are expected to have, if any.
        mesh_dim: The index or name of the mesh dimension of the group. Required for meshes with
            several dimensions.

    Returns:
        The group of the first DTensor, None if there is no DTensor.

    Raises:
        ValueError: Two DTensors have groups with different ranks, or other ranks than
            ``data_parallel_group``, or ``mesh_dim`` is missing or wrong.

    Example:
        >>> resolve_data_parallel_group([torch.ones(2), torch.ones(3)]) is None
        True
    """
    shared = None
    for tensor in tensors:
        group = get_data_parallel_group_if_dtensor(
            tensor, shared or data_parallel_group, mesh_dim=mesh_dim
        )
        shared = shared or group
    return shared


def every_rank_has_elements(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Iterable[object]
) -> bool:
    """Return whether every rank of a mesh holds at least one element of a tensor with elements.

    Pure arithmetic, the same on every rank. Placements with a ``dim`` are cut as by
    ``torch.chunk``.
    """
    sizes = [{size} for size in shape]  # of each dimension, the distinct lengths of its shards
    for num_shards, placement in zip(mesh_shape, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int):
            continue
        # A strided shard cuts each of `split_factor` pieces and joins the chunks of one index.
        factor = getattr(placement, "split_factor", 1)
        cuts = [
            [_chunk_size(size, factor, piece) for piece in range(factor)] for size in sizes[dim]
        ]
        sizes[dim] = {
            sum(_chunk_size(piece, num_shards, index) for piece in pieces)
            for pieces in cuts
            for index in range(num_shards)
        }
    return not any(0 in lengths for lengths in sizes)


def _chunk_size(size: int, num_chunks: int, index: int) -> int:
    """Return the length of a chunk of ``torch.chunk``, zero for chunks that it omits."""
    full = -(-size // num_chunks)
    return min(max(size - index * full, 0), full)
