"""CPU memory for the steps within one operation."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """Uninitialised CPU memory, one piece per dtype, that each request takes back from the last.

    Memory that is allocated anew for every step is mapped anew by the system, page by page, which
    costs more than the step itself. This is for one call of an operation and one thread.

    Args:
        capacity: The number of elements to allocate at first; a longer request gets more.

    Example:
        >>> scratch = Scratch(8)
        >>> scratch.take(3, torch.float32).shape
        torch.Size([3])
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a one-dimensional tensor; what an earlier request of the dtype got is void.

        Args:
            length: The number of elements.
            dtype: The element type.

        Returns:
            The tensor, on the CPU.

        Example:
            >>> Scratch(2).take(4, torch.int8).numel()
            4
        """
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < length:
            memory = torch.empty(max(length, self._capacity), dtype=dtype, device="cpu")
            self._memory[dtype] = memory
        return memory[:length]
