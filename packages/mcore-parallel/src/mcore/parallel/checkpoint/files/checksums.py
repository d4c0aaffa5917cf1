"""Checksums of pieces of files, and the memory that the pieces pass through."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator

import torch
import xxhash

from mcore.parallel.tensor_memory import memory_of

DIGITS = 16
_SCRATCH_BYTES = 1 << 20  # small enough to stay in the cache between reading and adding up
_GROUP_WORDS = 16
_GROUP_BYTES = 8 * _GROUP_WORDS

Unbuffered = io.RawIOBase | io.BytesIO


def read_exactly(stream: Unbuffered, offset: int, memory: memoryview) -> None:
    """Fill memory with the bytes of a file from an offset on; EOFError when it ends before."""
    stream.seek(offset)
    read_on(stream, memory)


def read_on(stream: Unbuffered, memory: memoryview) -> None:
    """Fill memory with the next bytes of a file; EOFError when it ends before."""
    left = memory
    while left:
        count = stream.readinto(left)
        if not count:
            end = stream.tell()
            raise EOFError(f"it ends at byte {end}, not {end + len(left)}")
        left = left[count:]


class Scratch:
    """Memory, of a multiple of 128 bytes, that pieces of files pass through on their way."""

    def __init__(self, num_bytes: int = _SCRATCH_BYTES) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.memory = memory_of(self.tensor)

    def fill(self, stream: Unbuffered, offset: int, length: int) -> None:
        """Read bytes of a file to the start of the memory; EOFError when it ends before."""
        read_exactly(stream, offset, self.memory[:length])


def checksum_of(content: bytes | bytearray | memoryview) -> str:
    """Return the checksum of some bytes, XXH3 of 64 bits, as 16 hexadecimal digits.

    Content that changed by accident keeps its checksum once in 2**64 cases. Somebody who changes
    it on purpose can keep the checksum: it does not protect against that.
    """
    return xxhash.xxh3_64_hexdigest(content)


class RunningChecksum:
    """The checksum of bytes that come one after the other."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.update = self._state.update

    def digits(self) -> str:
        """Return what :func:`checksum_of` gives for all bytes so far."""
        return self._state.hexdigest()


def checksum_in(stream: Unbuffered, offset: int, length: int, scratch: Scratch) -> str:
    """Return the checksum of some bytes of an unbuffered file."""
    running = RunningChecksum()
    for count in _filled(stream, offset, length, scratch):
        running.update(scratch.memory[:count])
    return running.digits()


# Version 2 of the manifest: each 128 bytes are summed as sixteen 64-bit integers; the checksum has
# the CRC-32 of these sums and the sum of all. It misses two integers that change places.
def sums_in(stream: Unbuffered, offset: int, length: int, scratch: Scratch) -> str:
    """Return the checksum that version 2 of the manifest had, as 24 hexadecimal digits."""
    crc, total = 0, 0
    for count in _filled(stream, offset, length, scratch):
        padded = -(-count // _GROUP_BYTES) * _GROUP_BYTES
        scratch.tensor[count:padded] = 0
        sums = scratch.tensor[:padded].view(torch.int64).view(-1, _GROUP_WORDS).sum(1)
        crc = zlib.crc32(memory_of(sums), crc)
        total += int(sums.sum())
    return f"{crc:08x}{total % (1 << 64):016x}"


def sums_of(content: bytes) -> str:
    """Return the checksum of version 2 of some bytes."""
    return sums_in(io.BytesIO(content), 0, len(content), Scratch())


def _filled(stream: Unbuffered, offset: int, length: int, scratch: Scratch) -> Iterator[int]:
    """Read bytes to the scratch memory, as many at a time as fit, and yield how many."""
    size = scratch.tensor.numel()
    for start in range(0, length, size):
        count = min(size, length - start)
        scratch.fill(stream, offset + start, count)
        yield count
