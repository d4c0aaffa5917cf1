"""The memory of a tensor as Python sees bytes, without NumPy, which torch does not need."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["memory_of"]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy.

    Args:
        tensor: A contiguous tensor on the CPU, of any dtype.

    Returns:
        Its bytes, in row-major order of the elements; writing to them changes the tensor. They
        keep the tensor alive.

    Example:
        >>> import torch
        >>> memory_of(torch.tensor([1, 256], dtype=torch.int16)).tolist()
        [1, 0, 0, 1]
    """
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
