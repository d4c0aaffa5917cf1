"""Scaled copies of many tensors that share dtypes and devices, with a check for non-finite input.

PyTorch checks and multiplies in one pass only in place. Other data is processed in batches that fit
into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mcore.tensor.device import are_traced

# All in elements.
_SMALL = 1 << 16  # larger tensors are not packed: the copy costs more than it saves
_TOGETHER = 1 << 17  # small tensors copied before they are multiplied
_PACK = 1 << 19  # small tensors packed together
_CPU_BLOCK = 1 << 19  # part of a long tensor processed at a time
_ACCELERATOR_BLOCK = 1 << 24  # limits the memory of the wide products for a narrow result


def scaled_copy(sources: list[Tensor], destinations: list[Tensor], scale: float | Tensor) -> Tensor:
    """Write ``source * scale`` into each destination. Return a 0-d tensor: not 0 if one overflowed.

    Either all destinations are their sources or none is. The product is rounded once.
    """
    # Foreach operations refuse the negative bit of a destination. torch.compile cannot read it.
    is_traced = are_traced(sources)
    if not is_traced and any(map(Tensor.is_neg, destinations)):
        plain = [destination.resolve_neg() for destination in destinations]
        in_place = sources[0] is destinations[0]
        non_finite = scaled_copy(plain if in_place else sources, plain, scale)
        for destination, result in zip(destinations, plain, strict=True):
            if result is not destination:
                destination.copy_(result)
        return non_finite
    device, dtype = destinations[0].device, destinations[0].dtype
    if sources[0].device != device:
        sources = [moved(source, device) for source in sources]
    wide = torch.promote_types(torch.promote_types(sources[0].dtype, dtype), torch.float32)
    length = sum([source.numel() for source in sources])
    multiply = _CheckedMultiply(scale, wide, device, length, is_traced)
    # CUDA has no fused operation for bfloat16: it goes through wide products there.
    is_fused = device.type == "cpu" or dtype != torch.bfloat16
    if sources[0] is destinations[0] and is_fused:
        multiply.in_place(destinations)
    elif device.type == "cpu":
        _scale_on_cpu(sources, destinations, multiply)
    else:
        sources, destinations = _cut(sources, destinations, _ACCELERATOR_BLOCK)
        for batch in _split_into_batches(sources, _ACCELERATOR_BLOCK):
            _scale_batch(sources[batch], destinations[batch], multiply, is_fused)
    return multiply.non_finite()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for a copy to an accelerator.

    A copy from pinned memory is waited for: it reads the memory when the caller may be writing it.
    """
    if tensor.device == device:
        return tensor
    reads_late = tensor.device.type == "cpu" and tensor.is_pinned()
    return tensor.to(device, non_blocking=device.type != "cpu" and not reads_late)


class _CheckedMultiply:
    """Multiplies by a factor and records, on the device, whether all input was finite."""

    def __init__(
        self,
        scale: float | Tensor,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
        is_traced: bool,
    ) -> None:
        self.dtype = dtype
        self.is_traced = is_traced
        self.is_identity = not isinstance(scale, Tensor) and scale == 1
        self._extremes: list[Tensor] = []
        self.scratch = Scratch(min(length, _CPU_BLOCK))
        if isinstance(scale, Tensor):
            self._factor = moved(scale.reshape(()), device).to(dtype)
        elif dtype == torch.float32 and abs(scale) <= torch.finfo(dtype).max:
            # Both scalars with one kernel, since on an accelerator each costs a launch.
            self._non_finite, self._factor = torch.linspace(
                0, scale, 2, dtype=dtype, device=device
            ).unbind()
            return
        else:
            if abs(scale) > torch.finfo(dtype).max:  # torch.full refuses a finite number like that
                scale = math.copysign(math.inf, scale)
            self._factor = torch.full((), scale, dtype=dtype, device=device)
        self._non_finite = torch.zeros((), dtype=torch.float32, device=device)

    def in_place(self, tensors: list[Tensor]) -> None:
        check_and_multiply = torch._amp_foreach_non_finite_check_and_unscale_
        torch.autograd.graph.increment_version(tensors)  # the fused operation does not
        if self.dtype == torch.float32:
            check_and_multiply(tensors, self._non_finite, self._factor)
            return
        # The fused operation accepts only a float32 factor: it checks here, and the multiplication
        # in float64 is a separate operation.
        check_and_multiply(tensors, self._non_finite, torch.ones_like(self._non_finite))
        torch._foreach_mul_(tensors, self._factor)

    def into(self, source: Tensor, product: Tensor) -> None:
        torch.mul(source, self._factor, out=product)
        self.check(source, product)

    def check(self, source: Tensor, product: Tensor) -> None:
        """Record whether a source is finite. It is if the product is.

        The sum is the fastest check in CPU memory: a finite sum means finite elements. Otherwise
        the sum may have overflowed, and the extremes decide.
        """
        total: Any = math.nan if self.is_traced else product.sum().tolist()
        if not math.isfinite(total):
            self._extremes.extend(torch.aminmax(source))

    def non_finite(self) -> Tensor:
        if not self._extremes:
            return self._non_finite
        finite = torch.stack(self._extremes).isfinite().all()
        return self._non_finite.logical_or(finite.logical_not())


def _scale_on_cpu(
    sources: list[Tensor], destinations: list[Tensor], multiply: _CheckedMultiply
) -> None:
    # If the destination has the precision of the product, no memory between is needed.
    keeps_source = destinations[0].dtype in (sources[0].dtype, multiply.dtype)
    scale_batch = _scale_batch if keeps_source else _scale_pack
    # torch.export cannot report a limit of a maximum: there each tensor is compared.
    if multiply.is_traced or max([source.numel() for source in sources]) > _SMALL:
        sources, destinations = _cut(sources, destinations, _CPU_BLOCK)
        small = [index for index, source in enumerate(sources) if source.numel() <= _SMALL]
        for source, destination in zip(sources, destinations, strict=True):
            if source.numel() > _SMALL:
                _scale_long(source, destination, multiply)
        sources = [sources[index] for index in small]
        destinations = [destinations[index] for index in small]
    for batch in _split_into_batches(sources, _TOGETHER if keeps_source else _PACK):
        scale_batch(sources[batch], destinations[batch], multiply)


def _scale_long(source: Tensor, destination: Tensor, multiply: _CheckedMultiply) -> None:
    if multiply.is_identity:
        destination.copy_(source)
        multiply.check(source, source)
        return
    # Two tensors on the same memory: the multiplication in place reads and writes it once. The
    # address is unknown while a compiler traces.
    if (
        not multiply.is_traced
        and source.data_ptr() == destination.data_ptr()
        and source.stride() == destination.stride()
        and source.is_neg() == destination.is_neg()
        and source.dtype == destination.dtype
    ):
        multiply.in_place([destination])
        return
    product = destination
    if destination.dtype not in (source.dtype, multiply.dtype):
        product = multiply.scratch.take(destination.numel(), multiply.dtype)
        product = product.view(destination.shape)
    if source.dtype == product.dtype:
        multiply.into(source, product)
    else:
        product.copy_(source)
        multiply.in_place([product])
    if product is not destination:
        destination.copy_(product)


def _scale_pack(
    sources: list[Tensor], destinations: list[Tensor], multiply: _CheckedMultiply
) -> None:
    flat = [source if source.dim() == 1 else source.reshape(-1) for source in sources]
    length = sum(source.numel() for source in flat)
    pack = torch.cat(flat, out=multiply.scratch.take(length, sources[0].dtype))
    if multiply.is_identity:
        multiply.check(pack, pack)
        torch._foreach_copy_(destinations, sources)
        return
    if pack.dtype != multiply.dtype:
        pack = multiply.scratch.take(length, multiply.dtype).copy_(pack)
    multiply.in_place([pack])
    products = torch.split(pack, [source.numel() for source in flat])
    torch._foreach_copy_(
        destinations,
        [
            product if destination.dim() == 1 else product.view(destination.shape)
            for product, destination in zip(products, destinations, strict=True)
        ],
    )


def _scale_batch(
    sources: list[Tensor],
    destinations: list[Tensor],
    multiply: _CheckedMultiply,
    is_fused: bool = True,
) -> None:
    products = destinations
    if not is_fused or destinations[0].dtype not in (sources[0].dtype, multiply.dtype):
        lengths = [tensor.numel() for tensor in destinations]
        joined = torch.empty(sum(lengths), dtype=multiply.dtype, device=destinations[0].device)
        products = [
            # Copies of many tensors take one kernel only if all pairs have equal strides.
            piece.view(tensor.shape)
            if tensor.is_contiguous()
            else torch.empty_like(tensor, dtype=multiply.dtype)
            for piece, tensor in zip(torch.split(joined, lengths), destinations, strict=True)
        ]
    torch._foreach_copy_(products, sources)
    multiply.in_place(products)
    if products is not destinations:
        torch._foreach_copy_(destinations, products)


def _split_into_batches(tensors: list[Tensor], limit: int) -> Iterator[slice]:
    """Yield slices of the list with at most ``limit`` elements in total, or with one tensor."""
    start = batched = 0
    for index, tensor in enumerate(tensors):
        length = tensor.numel()
        if batched + length > limit and index > start:
            yield slice(start, index)
            start, batched = index, 0
        batched += length
    if tensors:
        yield slice(start, len(tensors))


def _cut(
    sources: list[Tensor], destinations: list[Tensor], limit: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the same pairs, with pairs of more than ``limit`` elements split into parts."""
    if all(source.numel() <= limit for source in sources):
        return sources, destinations
    source_parts: list[Tensor] = []
    destination_parts: list[Tensor] = []
    for source, destination in zip(sources, destinations, strict=True):
        if source.is_contiguous() and destination.is_contiguous():
            source, destination = source.view(-1), destination.view(-1)
        num_rows = max(1, limit * len(source) // source.numel())
        source_parts += torch.split(source, num_rows)
        destination_parts += torch.split(destination, num_rows)
    return source_parts, destination_parts


class Scratch:
    """Uninitialised CPU memory for one call in one thread, one piece per dtype.

    The system maps new memory page by page, which takes longer than the operations on it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a one-dimensional tensor. Earlier tensors of the same dtype become invalid."""
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < length:
            memory = torch.empty(max(length, self._capacity), dtype=dtype, device="cpu")
            self._memory[dtype] = memory
        return memory[:length]
