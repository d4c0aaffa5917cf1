"""Checksums of pieces of files: the documented value, and what they notice."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel.checkpoint.files.checksums import Scratch, checksum_of_bytes, checksum_of_piece


def expected(content: bytes) -> str:
    """The documented checksum, one integer after the other."""
    padded = content + bytes(-len(content) % 128)
    words = struct.unpack(f"={len(padded) // 8}Q", padded)
    sums = [sum(words[at : at + 16]) % 2**64 for at in range(0, len(words), 16)]
    crc = zlib.crc32(struct.pack(f"={len(sums)}Q", *sums))
    return f"{crc:08x}{sum(sums) % 2**64:016x}"


@settings(deadline=None)
@given(st.binary(max_size=700))
def test_value_is_the_documented_one(content: bytes) -> None:
    assert checksum_of_bytes(content) == expected(content)


@pytest.mark.parametrize("length", [(1 << 21) - 1, 1 << 21, (1 << 21) + 1, 5_000_001])
def test_pieces_larger_than_the_scratch_memory(length: int, tmp_path: Path) -> None:
    content = random.Random(length).randbytes(length)
    (tmp_path / "file").write_bytes(b"before" + content + b"after")
    with (tmp_path / "file").open("rb", buffering=0) as stream:
        assert checksum_of_piece(stream, 6, length, Scratch()) == expected(content)
        assert checksum_of_piece(stream, 6, length, Scratch(256)) == expected(content)


def test_each_changed_byte_is_noticed() -> None:
    draw = random.Random(0)
    content = draw.randbytes(600)
    good = checksum_of_bytes(content)
    for at in range(600):
        for mask in (1, 0x80, 0xFF, draw.randrange(1, 256)):
            changed = bytearray(content)
            changed[at] ^= mask
            assert checksum_of_bytes(bytes(changed)) != good, (at, mask)


@pytest.mark.parametrize("block", [128, 512, 4096])
def test_blocks_that_are_zeroed_or_change_places_are_noticed(block: int) -> None:
    content = random.Random(block).randbytes(block * 8)
    good = checksum_of_bytes(content)
    blocks = [content[at : at + block] for at in range(0, len(content), block)]
    for one in range(8):
        zeroed = [*blocks[:one], bytes(block), *blocks[one + 1 :]]
        assert checksum_of_bytes(b"".join(zeroed)) != good
        for other in range(one):
            swapped = list(blocks)
            swapped[one], swapped[other] = blocks[other], blocks[one]
            assert checksum_of_bytes(b"".join(swapped)) != good


def test_a_file_that_ends_early_is_an_error() -> None:
    with pytest.raises(EOFError, match="ends at byte 10, not 12"):
        checksum_of_piece(io.BytesIO(bytes(10)), 4, 8, Scratch())
