"""Bytes of files in the memory of tensors."""

from __future__ import annotations

import io

import torch

from mcore.parallel.tensor_memory import memory_of

__all__ = ["Scratch", "Unbuffered", "read_exactly"]

_SCRATCH_BYTES = 1 << 21  # small enough to stay in the cache between reading and adding up

Unbuffered = io.RawIOBase | io.BytesIO


def read_exactly(stream: Unbuffered, offset: int, memory: memoryview) -> None:
    """Fill memory with the bytes of a file from an offset on.

    Raises:
        EOFError: The file ends before.
    """
    stream.seek(offset)
    done = 0
    while done < len(memory):
        count = stream.readinto(memory[done:])
        if not count:
            raise EOFError(f"it ends at byte {offset + done}, not {offset + len(memory)}")
        done += count


class Scratch:
    """Memory that parts of files pass through on their way.

    Args:
        num_bytes: Its size; a multiple of 128.

    Attributes:
        tensor: The memory as uint8 elements.
    """

    def __init__(self, num_bytes: int = _SCRATCH_BYTES) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self._memory = memory_of(self.tensor)

    def fill(self, stream: Unbuffered, offset: int, length: int) -> None:
        """Read bytes of a file to the start of the memory.

        Raises:
            EOFError: The file ends before.
        """
        read_exactly(stream, offset, self._memory[:length])
