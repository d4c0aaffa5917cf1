"""Norms and scaled copies of many tensors at once, called like the kernels of apex's ``amp_C``.

They accept any mix of float dtypes and never read a tensor on the host. Non-finite data sets a
flag, an integer tensor with one element, to 1. They never clear the flag and do not act on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor
from mcore.tensor.multi_tensor.lists import (
    TensorLists,
    check_data,
    check_tensors,
    checked_noop_flag,
    checked_tensor_lists,
    indices_by_kind,
)
from mcore.tensor.multi_tensor.norms import norms_of_pieces, norms_of_tensors
from mcore.tensor.multi_tensor.scaling import moved, scaled_copy
from mcore.tensor.param_flags import ensure_params_ready

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "calc_norm",
    "local_multi_tensor_applier",
    "local_multi_tensor_l2_norm",
    "local_multi_tensor_scale",
]

# The mesh of a DTensor and its dimensions over which the DTensor is split.
_Shards: TypeAlias = "tuple[DeviceMesh, tuple[int, ...]]"

R = TypeVar("R")
T = TypeVar("T")

_CHUNK_SIZE = 2048 * 32  # the default of apex. Its kernels require a chunk size


def local_multi_tensor_applier(
    op: Callable[..., R], noop_flag_buffer: Tensor | None, tensor_lists: TensorLists, *args: Any
) -> R:
    """Call a multi-tensor operation with the default chunk size.

    Args:
        op: An operation of this module, or another function with the same first three parameters:
            chunk size, flag and tensor lists.
        noop_flag_buffer: The overflow flag for the operation.
        tensor_lists: The lists of tensors for the operation.
        *args: Further arguments of the operation.

    Returns:
        The result of the operation.

    Example:
        >>> flag = torch.zeros(1, dtype=torch.int)
        >>> tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
        >>> norm, _ = local_multi_tensor_applier(
        ...     local_multi_tensor_l2_norm, flag, [tensors], False
        ... )
        >>> norm
        tensor([5.])
    """
    return op(_CHUNK_SIZE, noop_flag_buffer, tensor_lists, *args)


@torch.no_grad()
def local_multi_tensor_l2_norm(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    per_tensor: bool | None,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    """Return the L2 norm of all tensors together and, if requested, of each.

    Squares are summed in float32, those of float64 tensors in float64. Non-finite data, and finite
    data whose sum of squares overflows, give a non-finite norm and set the flag. Only local tensors
    count, without communication: callers with shards add up ``norm ** 2`` over their group.

    Args:
        chunk_size: Accepted for compatibility with apex and ignored.
        noop_flag: An integer tensor with one element, set to 1 if the norm is not finite, or
            None. A flag on another device than the norm costs a copy.
        tensor_lists: Lists of plain tensors, joined to a single list.
        per_tensor: Whether to return the norm of each tensor too. None means no.
        *args: Ignored.

    Returns:
        The norm, float32 of shape ``[1]``, and the norms of the ``n`` tensors in their order,
        float32 of shape ``[n]``, or ``[0]`` if they are not requested. Both are on the device of
        the first tensor. Without tensors, on the device of the flag, else on the CPU.

    Raises:
        TypeError: A tensor is a DTensor or sparse, or has an integer, boolean, complex or 8-bit
            dtype, or the flag is not an integer tensor.
        ValueError: The flag does not have exactly one element, only some tensors are on the meta
            device, or all are and the flag is not.

    Example:
        >>> flag = torch.zeros(1, dtype=torch.int)
        >>> tensors = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
        >>> local_multi_tensor_l2_norm(2048 * 32, flag, [tensors], True)
        (tensor([13.]), tensor([ 5., 12.]))
    """
    flag = checked_noop_flag(noop_flag)
    tensors = [tensor for tensors in checked_tensor_lists(tensor_lists) for tensor in tensors]
    first = tensors[0] if tensors else flag
    device = torch.device("cpu") if first is None else first.device
    lengths = [tensor.numel() for tensor in tensors]
    groups = _group_filled(tensors, lengths)
    check_data([tensors[group[0]] for group in groups], flag)
    norms_of = norms_of_tensors if per_tensor else norms_of_pieces
    parts = [norms_of(_pick(tensors, group), _pick(lengths, group)) for group in groups]
    norm = _join_norms(parts, device)
    if flag is not None:
        _raise_if(norm - norm, flag)  # NaN unless the norm is finite
    if not (per_tensor and tensors):
        return norm, torch.empty(0, dtype=torch.float32, device=device)
    here = [moved(part.to(torch.float32), device) for part in parts]
    if len(here) == 1 and len(groups[0]) == len(tensors):
        return norm, here[0]
    # Groups have another order and omit empty tensors, which have a norm of zero.
    norms = [torch.zeros((), dtype=torch.float32, device=device)] * len(tensors)
    for part, group in zip(here, groups, strict=True):
        for index, one in zip(group, part.unbind(), strict=True):
            norms[index] = one
    return norm, torch.stack(norms)


@torch.no_grad()
def local_multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Write each source tensor times a factor into its destination, and flag non-finite sources.

    The product is computed in float32 (float64 if the source or the destination is float64), then
    cast. The flag is set if an element of a source is not finite. A finite element that overflows
    a narrower destination is written as infinity and does not set the flag. With a factor of 1
    this is a checked copy.

    Args:
        chunk_size: Accepted for compatibility with apex and ignored.
        noop_flag: An integer tensor with one element, set to 1 if a source is not finite, or
            None. A flag on another device than the destinations costs a copy.
        tensor_lists: ``[sources, destinations]``: two lists of plain tensors of the same length.
            Both tensors of a pair have the same number of elements, or are the same tensor. If
            their shapes differ, elements are copied in the order of ``reshape(-1)``. The result is
            undefined if different tensors overlap, or if a pair writes memory that another reads.
        scale: A number, or a tensor with one element, which is not read on the host.

    Raises:
        ValueError: There are not exactly two lists of the same length, a pair differs in the
            number of elements, the flag or ``scale`` does not have exactly one element, only some
            tensors are on the meta device, or all are and the flag is not. Nothing is written.
        TypeError: A tensor is a DTensor or sparse, or has an integer, boolean, complex or 8-bit
            dtype, ``scale`` is not a real number, or the flag is not an integer tensor. Nothing is
            written.

    Example:
        >>> flag = torch.zeros(1, dtype=torch.int)
        >>> sources = [torch.tensor([1.0, 2.0])]
        >>> destinations = [torch.empty(2, dtype=torch.bfloat16)]
        >>> local_multi_tensor_scale(2048 * 32, flag, [sources, destinations], 0.5)
        >>> destinations
        [tensor([0.5000, 1.0000], dtype=torch.bfloat16)]
    """
    # Every check comes before the first write: a bad argument must not leave half of the result.
    flag = checked_noop_flag(noop_flag)
    factor = _check_scale(scale)
    groups = list(_group_pairs(*_check_pairs(checked_tensor_lists(tensor_lists))))
    check_data([tensors[0] for group in groups for tensors in group], flag, scale)
    for sources, destinations in groups:
        non_finite = scaled_copy(sources, destinations, factor)
        if flag is not None:
            _raise_if(non_finite, flag)


@torch.no_grad()
def calc_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of plain tensors and DTensors together, over all shards of each DTensor.

    Plain tensors count as they are on this rank. The squares of DTensors are summed over the ranks
    that hold their shards: one all-reduce (SUM of one number) for each mesh dimension, once for all
    DTensors that are split over the same dimensions. All ranks of a mesh have to call it with its
    DTensors in the same order, and all get the result. There is no communication for replicas or
    without DTensors, and no tensor is read on the host. Parameters that a backend gathers late are
    completed first, see ``ensure_params_ready``.

    Args:
        tensors: Tensors of any mix of float dtypes and devices. Shards may be empty.

    Returns:
        The norm, float32 without dimensions, on the device of the first tensor, or on the CPU
        without tensors. It is within 2e-6 of the exact norm, unless that is below 1e-18: such
        squares are too small for float32. As in ``local_multi_tensor_l2_norm``, squares that
        overflow the float32 sum of a few of them make it infinite.

    Raises:
        TypeError: A tensor is sparse, or has an integer, boolean, complex or 8-bit dtype, or
            ``tensors`` is a tensor.
        ValueError: A DTensor has a partial placement, or only some tensors are on the meta device.

    Example:
        >>> calc_norm([torch.tensor([3.0, 4.0]), torch.tensor([12.0], dtype=torch.bfloat16)])
        tensor(13.)
    """
    if isinstance(tensors, Tensor):
        raise TypeError("tensors must be a list of tensors, got a tensor")
    given = list(tensors)
    ensure_params_ready(given)
    shards = [_find_split_dims(tensor, index) for index, tensor in enumerate(given)]
    local = [to_local_if_dtensor(tensor) for tensor in given]
    check_tensors(local, "tensors")
    check_data(local, None)
    device = local[0].device if local else torch.device("cpu")
    by_shards: dict[_Shards | None, list[Tensor]] = {}
    for tensor, key in zip(local, shards, strict=True):
        by_shards.setdefault(key, []).append(tensor)
    norms: list[Tensor] = []
    for key, members in by_shards.items():
        norms += _norms_over_shards(members, key)
    return _norm_of([moved(norm, device) for norm in norms], device)


def _find_split_dims(tensor: Tensor, index: int) -> _Shards | None:
    """Return the mesh and mesh dimensions that split a DTensor, None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"tensors[{index}] is a DTensor with the placements {tensor.placements}: its norm is "
            "unknown before it is reduced. Call redistribute() first"
        )
    mesh = tensor.device_mesh
    dims = (
        dim
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
    return mesh, tuple(dims)


def _norms_over_shards(tensors: list[Tensor], shards: _Shards | None) -> list[Tensor]:
    """Return one-dimensional norms of all elements, over the ranks that hold the shards."""
    lengths = [tensor.numel() for tensor in tensors]
    norms = [
        norms_of_pieces(_pick(tensors, group), _pick(lengths, group))
        for group in _group_filled(tensors, lengths)
    ]
    if shards is None or not shards[1]:
        return norms
    mesh, dims = shards
    device = tensors[0].device
    square = _norm_of(
        [moved(norm, device) for norm in norms], device, _widest_dtype(device)
    ).square()
    for dim in dims:
        torch.distributed.all_reduce(square, group=mesh.get_group(dim))
    return [square.sqrt_().view(1)]


def _norm_of(
    norms: list[Tensor], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the norm of norms without dimensions.

    Computed in float64: the square of a float32 norm above 1.8e19 overflows float32.
    """
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    joined = norms[0] if len(norms) == 1 else torch.cat(norms)
    total: Tensor = torch.linalg.vector_norm(joined, dtype=_widest_dtype(device))
    return total.to(dtype)


def _widest_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _raise_if(condition: Tensor, flag: Tensor) -> None:
    """Set the flag to 1 if a number is not 0. NaN is not 0."""
    flag.logical_or_(moved(condition.view(flag.shape), flag.device))


def _join_norms(parts: list[Tensor], device: torch.device) -> Tensor:
    """Return the root of the sum of all squares, float32 [1]. Copies one scalar per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part.square().sum(0, keepdim=True))
    if not parts:
        return torch.zeros(1, dtype=torch.float32, device=device)
    total = _sum([moved(_sum(squares), device) for squares in by_device.values()])
    norm = total.sqrt_()
    return norm if norm.dtype == torch.float32 else norm.to(torch.float32)


def _sum(scalars: list[Tensor]) -> Tensor:
    """Return the sum, in float64 if one of the scalars is."""
    return scalars[0] if len(scalars) == 1 else torch.cat(scalars).sum(0, keepdim=True)


def _check_scale(scale: float | Tensor) -> float | Tensor:
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise ValueError(
                f"scale must be a number or a tensor with one element, got {tuple(scale.shape)}"
            )
        if scale.is_complex():
            raise TypeError(f"scale must be real, got a tensor of {scale.dtype}")
        return scale
    try:
        if isinstance(scale, (str, bytes)):
            raise TypeError("text is not a number, although float() accepts it")
        return float(scale)
    except TypeError as error:
        raise TypeError(
            f"scale must be a real number or a tensor with one element, got {type(scale).__name__}"
        ) from error


def _check_pairs(lists: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sources and destinations that have elements, each pair in one shape."""
    if len(lists) != 2:
        raise ValueError(
            f"tensor_lists must be two lists, sources and destinations, got {len(lists)} lists"
        )
    sources, destinations = lists
    if len(sources) != len(destinations):
        raise ValueError(
            f"there are {len(sources)} source tensors and {len(destinations)} destination tensors: "
            "pass one destination for each source"
        )
    for index, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source is destination or source.shape == destination.shape:
            continue
        if source.numel() != destination.numel():
            raise ValueError(
                f"pair {index} has a source of {source.numel()} elements and a destination of "
                f"{destination.numel()}: pass tensors with the same number"
            )
        sources[index] = source.reshape(destination.shape)
    return sources, destinations


def _pick(items: list[T], indices: list[int]) -> list[T]:
    return items if len(indices) == len(items) else [items[index] for index in indices]


def _group_filled(tensors: list[Tensor], lengths: list[int]) -> list[list[int]]:
    """Return the indices of non-empty tensors, in groups of the same device and dtype."""
    if 0 not in lengths:
        return indices_by_kind(tensors)
    filled = [index for index, length in enumerate(lengths) if length > 0]
    groups = indices_by_kind([tensors[index] for index in filled])
    return [[filled[index] for index in group] for group in groups]


def _group_pairs(
    sources: list[Tensor], destinations: list[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Group non-empty pairs by dtypes, devices, and whether source and destination are the same."""
    filled = [index for index, tensor in enumerate(destinations) if tensor.numel() > 0]
    for is_in_place in (True, False):
        chosen = [i for i in filled if (sources[i] is destinations[i]) is is_in_place]
        pair = _pick(sources, chosen), _pick(destinations, chosen)
        for group in indices_by_kind(*pair[is_in_place:]):
            yield _pick(pair[0], group), _pick(pair[1], group)
