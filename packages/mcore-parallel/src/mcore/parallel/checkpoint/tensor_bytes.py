"""The bytes of a tensor, without NumPy, which torch does not need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

__all__ = ["bytes_of", "pieces_of"]

_PIECE_BYTES = 1 << 26


def pieces_of(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield a tensor's elements in row-major order as bytes, at most 64 MiB at a time.

    Args:
        tensor: Of any device, strides and dtype, but not on the meta device.

    Example:
        >>> list(pieces_of(torch.tensor([1, 256], dtype=torch.int16)))
        [b'\\x01\\x00\\x00\\x01']
    """
    flat = tensor.detach().cpu().contiguous()
    total = flat.numel() * flat.element_size()
    for start in range(0, total, _PIECE_BYTES):
        yield ctypes.string_at(flat.data_ptr() + start, min(_PIECE_BYTES, total - start))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order as bytes."""
    return b"".join(pieces_of(tensor))
