"""Bytes of files, read into reused memory, and their checksums."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator

import torch

from mcore.parallel.tensor_memory import memory_of

_SCRATCH_BYTES = 1 << 21  # small enough to stay in the cache between reading and adding up
_GROUP_WORDS = 16
_GROUP_BYTES = 8 * _GROUP_WORDS

Unbuffered = io.RawIOBase | io.BytesIO


def read_exactly(stream: Unbuffered, offset: int, memory: memoryview) -> None:
    """Fill memory with the bytes of a file from an offset on; EOFError when it ends before."""
    stream.seek(offset)
    done = 0
    while done < len(memory):
        count = stream.readinto(memory[done:])
        if not count:
            raise EOFError(f"it ends at byte {offset + done}, not {offset + len(memory)}")
        done += count


class Scratch:
    """Memory, of a multiple of 128 bytes, that pieces of files pass through on their way."""

    def __init__(self, num_bytes: int = _SCRATCH_BYTES) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._memory = memory_of(self.tensor)

    def fill(self, stream: Unbuffered, offset: int, length: int) -> None:
        """Read bytes of a file to the start of the memory; EOFError when it ends before."""
        read_exactly(stream, offset, self._memory[:length])


# Each 128 bytes are summed as sixteen 64-bit integers. The checksum has the CRC-32 of these sums
# and the sum of all: one changed byte is always found, other damage but for one case in 2**32. It
# is ten times as fast as a CRC-32 of the bytes themselves. The order of the integers within 128
# bytes, which storage does not mix up, is not covered.
def checksum_of_piece(stream: Unbuffered, offset: int, length: int, scratch: Scratch) -> str:
    """Return the checksum of some bytes of an unbuffered file as 24 hexadecimal digits."""
    crc, total = 0, 0
    for words in _words(stream, offset, length, scratch):
        sums = words.view(-1, _GROUP_WORDS).sum(1)
        crc = zlib.crc32(memory_of(sums), crc)
        total += int(sums.sum())
    return f"{crc:08x}{total % (1 << 64):016x}"


def checksum_of_bytes(content: bytes) -> str:
    """Return the checksum that a piece of a file with this content has."""
    return checksum_of_piece(io.BytesIO(content), 0, len(content), Scratch())


def _words(
    stream: Unbuffered, offset: int, length: int, scratch: Scratch
) -> Iterator[torch.Tensor]:
    """Yield the bytes as int64, filled up with zeros to a multiple of 128 at the end."""
    size = scratch.tensor.numel()
    for start in range(0, length, size):
        count = min(size, length - start)
        scratch.fill(stream, offset + start, count)
        padded = -(-count // _GROUP_BYTES) * _GROUP_BYTES
        scratch.tensor[count:padded] = 0
        yield scratch.tensor[:padded].view(torch.int64)
