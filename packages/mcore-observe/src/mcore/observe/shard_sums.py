"""Sums of squares of tensors, some of which may be DTensors split over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from mcore.observe.host_reads import widest_float
from mcore.parallel.reductions import sum_over_group
from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor
from mcore.tensor.multi_tensor import local_multi_tensor_l2_norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["squares_of_each", "sum_of_squares"]

_CHUNK_SIZE = 2048 * 32
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_ShardSet: TypeAlias = "tuple[DeviceMesh, tuple[int, ...]]"


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of all elements; those of DTensors over the ranks that hold them.

    One all-reduce for each mesh dimension over which DTensors are split, and each set of such
    dimensions; all ranks of the mesh call it with the tensors in the same order, and get the sum.
    Replicated dimensions are not summed over. No collective without DTensors.

    Args:
        tensors: Plain tensors and DTensors of any shapes and types.

    Returns:
        One element of shape ``[]``, float64 where the device has it, on the device of the first
        tensor.

    Raises:
        RuntimeError: A DTensor with a partial placement, whose value no rank knows.

    Example:
        >>> sum_of_squares([torch.tensor([3.0, 4.0]), torch.tensor(12.0)])
        tensor(169., dtype=torch.float64)
    """
    sums = [
        _summed_over_shards(
            _local_squares([tensors[i] for i in members], together=True), shards
        ).squeeze(0)
        for shards, members in _by_shards(tensors).items()
    ]
    return torch.stack([s.to(sums[0].device) for s in sums]).sum() if sums else _zero()


def squares_of_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do as :func:`sum_of_squares` for each tensor by itself.

    Args:
        tensors: One tensor or more.

    Returns:
        ``[len(tensors)]``, float64 where the device has it.

    Raises:
        RuntimeError: A DTensor with a partial placement.

    Example:
        >>> squares_of_each([torch.tensor([3.0, 4.0]), torch.tensor(1.0)])
        tensor([25.,  1.], dtype=torch.float64)
    """
    parts: list[torch.Tensor] = []
    order: list[int] = []
    for shards, members in _by_shards(tensors).items():
        squares = _local_squares([tensors[i] for i in members], together=False)
        parts.append(_summed_over_shards(squares, shards))
        order += members
    unordered = torch.cat([part.to(parts[0].device) for part in parts])
    return torch.empty_like(unordered).index_copy_(
        0, torch.tensor(order, device=unordered.device), unordered
    )


def _by_shards(tensors: Sequence[torch.Tensor]) -> dict[_ShardSet | None, list[int]]:
    sets: dict[_ShardSet | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        sets.setdefault(_shard_set(tensor), []).append(index)
    return sets


def _shard_set(tensor: torch.Tensor) -> _ShardSet | None:
    if not is_dtensor(tensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(
            f"a DTensor of shape {tuple(tensor.shape)} has the placements {tensor.placements}; "
            "its norm is unknown before it is reduced: redistribute it first"
        )
    split = (i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tensor.device_mesh, tuple(split)


def _local_squares(tensors: Sequence[torch.Tensor], *, together: bool) -> torch.Tensor:
    local = [_summable(to_local_if_dtensor(tensor.detach())) for tensor in tensors]
    norm, norms = local_multi_tensor_l2_norm(_CHUNK_SIZE, None, [local], not together)
    found = norm if together else norms
    return found.to(widest_float(found.device)).square()


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _SUMMABLE else tensor.float()


def _summed_over_shards(squares: torch.Tensor, shards: _ShardSet | None) -> torch.Tensor:
    mesh, dims = shards if shards is not None else (None, ())
    for dim in dims:
        (squares,) = sum_over_group([squares], mesh.get_group(dim) if mesh else None)
    return squares


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)
