"""Read a box of a tensor whose elements lie in a file in row-major order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from mcore.parallel.checkpoint.raw_reads import Scratch, Unbuffered, read_exactly
from mcore.parallel.tensor_memory import memory_of

__all__ = ["read_box"]


def read_box(
    stream: Unbuffered,
    elements_at: int,
    shape: Sequence[int],
    start: Sequence[int],
    target: torch.Tensor,
    dtype: torch.dtype,
    scratch: Scratch,
) -> None:
    """Fill a tensor with a box of a stored one, without memory besides ``scratch``.

    Args:
        stream: An unbuffered file.
        elements_at: Where the first element of the stored tensor is in it.
        shape: Shape of the stored tensor.
        start: Where the box starts in the stored tensor, which has room for ``target`` there.
        target: What to fill, of any device, strides and floating-point dtype, or of ``dtype``.
        dtype: Of the stored elements.
        scratch: Memory for reading, which is overwritten.

    Raises:
        EOFError: The file ends before.
    """
    if not shape:
        shape, start, target = (1,), (0,), target.unsqueeze(0)
    row_bytes = prod(shape[1:]) * dtype.itemsize
    if _lies_alike(shape, target, dtype):
        read_exactly(stream, elements_at + start[0] * row_bytes, memory_of(target))
        target[:0].zero_()  # autograd counts changes, and has not seen this one
        return
    if len(shape) > 1 and row_bytes > scratch.tensor.numel():
        for row in range(target.shape[0]):
            at = elements_at + (start[0] + row) * row_bytes
            read_box(stream, at, shape[1:], start[1:], target[row], dtype, scratch)
        return
    step = scratch.tensor.numel() // row_bytes
    for first in range(0, target.shape[0], step):
        count = min(step, target.shape[0] - first)
        num_bytes = count * row_bytes
        scratch.fill(stream, elements_at + (start[0] + first) * row_bytes, num_bytes)
        rows = scratch.tensor[:num_bytes].view(dtype).view(count, *shape[1:])
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, start[dim], target.shape[dim])
        target.narrow(0, first, count).copy_(rows)


def _lies_alike(shape: Sequence[int], target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Say whether the bytes of a target are those of the file, one after the other."""
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and tuple(target.shape[1:]) == tuple(shape[1:])
    )
