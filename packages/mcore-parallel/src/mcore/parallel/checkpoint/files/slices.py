"""Slices of stored tensors, copied from a file to where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from mcore.parallel.checkpoint.files.checksums import (
    RunningChecksum,
    Scratch,
    Unbuffered,
    read_exactly,
    read_on,
)
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.tensor_memory import memory_of

_STEP_BYTES = 1 << 19  # read and checked at a time: small enough to stay in the cache of a core


class Part(NamedTuple):
    """A box of a stored shard and the tensor that it is copied to."""

    start: Shape
    target: torch.Tensor


class CheckedStream:
    """A file that is read in order, through memory or into targets, with a running checksum."""

    def __init__(self, stream: Unbuffered, at: int, scratch: Scratch) -> None:
        self.running = RunningChecksum()
        self.scratch = scratch
        self._stream = stream
        stream.seek(at)

    def read(self, memory: memoryview) -> None:
        """Fill memory step by step, adding up each step while it is in the cache."""
        for start in range(0, len(memory), _STEP_BYTES):
            step = memory[start : start + _STEP_BYTES]
            read_on(self._stream, step)
            self.running.update(step)

    def skip(self, length: int) -> None:
        """Add up bytes that nobody needs."""
        size = len(self.scratch.memory)
        for start in range(0, length, size):
            self.read(self.scratch.memory[: min(size, length - start)])


def sweep(stream: CheckedStream, shape: Shape, parts: Sequence[Part], dtype: torch.dtype) -> None:
    """Read a whole shard, which comes next, row-major, and fill the targets with their parts."""
    if not shape:
        shape = (1,)
        parts = [Part((0,), part.target.unsqueeze(0)) for part in parts]
    row_bytes = prod(shape[1:]) * dtype.itemsize
    if len(parts) == 1 and _lies_alike(shape, parts[0].target, dtype):
        start, target = parts[0].start[0], parts[0].target
        stream.skip(start * row_bytes)
        stream.read(memory_of(target))
        stream.skip((shape[0] - start - target.shape[0]) * row_bytes)
        target[:0].zero_()  # autograd counts changes and has not seen this one
        return
    if not parts:
        stream.skip(shape[0] * row_bytes)
        return
    if len(shape) > 1 and row_bytes > len(stream.scratch.memory):
        for row in range(shape[0]):
            sweep(stream, shape[1:], _in_row(parts, row), dtype)
        return
    step = max(1, len(stream.scratch.memory) // max(1, row_bytes))
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        memory = stream.scratch.memory[: count * row_bytes]
        stream.read(memory)
        rows = stream.scratch.tensor[: len(memory)].view(dtype).view(count, *shape[1:])
        for part in parts:
            _copy_rows(rows, first, part)


def _in_row(parts: Sequence[Part], row: int) -> list[Part]:
    return [
        Part(part.start[1:], part.target[row - part.start[0]])
        for part in parts
        if part.start[0] <= row < part.start[0] + part.target.shape[0]
    ]


def _copy_rows(rows: torch.Tensor, first: int, part: Part) -> None:
    """Copy what a part needs of the rows from ``first`` on."""
    begin = max(first, part.start[0])
    end = min(first + rows.shape[0], part.start[0] + part.target.shape[0])
    if begin >= end:
        return
    source = rows[begin - first : end - first]
    for dim in range(1, rows.ndim):
        source = source.narrow(dim, part.start[dim], part.target.shape[dim])
    part.target[begin - part.start[0] : end - part.start[0]].copy_(source)


def read_slice(
    stream: Unbuffered,
    elements_at: int,
    shape: Sequence[int],
    start: Sequence[int],
    target: torch.Tensor,
    dtype: torch.dtype,
    scratch: Scratch,
) -> None:
    """Fill a tensor with a slice, from ``start`` on, of one of ``shape`` stored in row-major order.

    The target has any device, strides and floating-point dtype, or ``dtype``, the stored one.
    """
    if not shape:
        shape, start, target = (1,), (0,), target.unsqueeze(0)
    row_bytes = prod(shape[1:]) * dtype.itemsize
    if _lies_alike(shape, target, dtype):
        read_exactly(stream, elements_at + start[0] * row_bytes, memory_of(target))
        target[:0].zero_()  # autograd counts changes and has not seen this one
        return
    if len(shape) > 1 and row_bytes > scratch.tensor.numel():
        for row in range(target.shape[0]):
            at = elements_at + (start[0] + row) * row_bytes
            read_slice(stream, at, shape[1:], start[1:], target[row], dtype, scratch)
        return
    step = scratch.tensor.numel() // row_bytes
    for first in range(0, target.shape[0], step):
        count = min(step, target.shape[0] - first)
        num_bytes = count * row_bytes
        scratch.fill(stream, elements_at + (start[0] + first) * row_bytes, num_bytes)
        rows = scratch.tensor[:num_bytes].view(dtype).view(count, *shape[1:])
        _copy_rows(rows, 0, Part((0, *start[1:]), target.narrow(0, first, count)))


def _lies_alike(shape: Sequence[int], target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the bytes of a target are those of the file, one after the other."""
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and tuple(target.shape[1:]) == tuple(shape[1:])
    )
