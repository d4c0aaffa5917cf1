"""The bytes of a tensor, wherever and however it lies."""

from __future__ import annotations

import torch

from mcore.parallel.tensor_memory import memory_of

__all__ = ["bytes_of", "row_major_on_cpu"]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order as bytes.

    Args:
        tensor: Of any device, strides and dtype, but not on the meta device.

    Example:
        >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T)
        b'\\x01\\x03\\x02\\x04'
    """
    return bytes(memory_of(row_major_on_cpu(tensor)))


def row_major_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same values on the CPU, detached; a copy if need be."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
