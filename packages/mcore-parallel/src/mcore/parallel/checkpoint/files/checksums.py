"""Checksums of pieces of files, and the memory that pieces are read into."""

from __future__ import annotations

import io

import torch
import xxhash

from mcore.parallel.tensor_memory import memory_of

DIGITS = 16
RunningChecksum = xxhash.xxh3_64
"""The :func:`checksum_of` bytes that are added one after the other, by its ``hexdigest()``."""
_SCRATCH_BYTES = 1 << 20  # small enough to stay in the cache until its checksum is computed

Unbuffered = io.RawIOBase | io.BytesIO


def read_exactly(stream: Unbuffered, offset: int, memory: memoryview) -> None:
    """Fill memory with the bytes of a file from an offset on. A short file is an EOFError."""
    stream.seek(offset)
    read_next(stream, memory)


def read_next(stream: Unbuffered, memory: memoryview) -> None:
    """Fill memory with the next bytes of a file. A short file is an EOFError."""
    left = memory
    while left:
        count = stream.readinto(left)
        if not count:
            end = stream.tell()
            raise EOFError(f"it ends at byte {end}, not {end + len(left)}")
        left = left[count:]


class Scratch:
    """Memory that pieces of files are read into before they are copied to a target."""

    def __init__(self, num_bytes: int = _SCRATCH_BYTES) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.memory = memory_of(self.tensor)

    def fill(self, stream: Unbuffered, offset: int, length: int) -> None:
        """Read bytes of a file to the start of the memory. A short file is an EOFError."""
        read_exactly(stream, offset, self.memory[:length])


def checksum_of(content: bytes | bytearray | memoryview) -> str:
    """Return the checksum of some bytes, XXH3 of 64 bits, as 16 hexadecimal digits.

    An accidental change keeps the checksum once in 2**64 cases. It is no protection against an
    attacker, who can choose content with a given checksum.
    """
    return xxhash.xxh3_64_hexdigest(content)


def checksum_in(stream: Unbuffered, offset: int, length: int, scratch: Scratch) -> str:
    """Return the checksum of some bytes of an unbuffered file."""
    running, size = RunningChecksum(), len(scratch.memory)
    for start in range(0, length, size):
        count = min(size, length - start)
        scratch.fill(stream, offset + start, count)
        running.update(scratch.memory[:count])
    return running.hexdigest()
