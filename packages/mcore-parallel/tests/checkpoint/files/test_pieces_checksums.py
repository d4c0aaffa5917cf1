"""Checksums of pieces of files: the documented value, and what they notice."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel.checkpoint.files.pieces import (
    RunningChecksum,
    Scratch,
    checksum_in,
    checksum_of,
)


def test_value_is_that_of_the_reference() -> None:
    """Numbers that the C library xxHash 0.8.1 gives."""
    assert checksum_of(b"") == "2d06800538d394c2"
    assert checksum_of(b"Nobody inspects the spammish repetition") == "6cb00603b5cc47e9"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_parts_add_up_to_the_whole(parts: list[bytes]) -> None:
    running = RunningChecksum()
    for part in parts:
        running.update(part)
    assert running.hexdigest() == checksum_of(b"".join(parts))


@pytest.mark.parametrize("length", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_001])
def test_pieces_larger_than_the_scratch_memory(length: int, tmp_path: Path) -> None:
    content = random.Random(length).randbytes(length)
    (tmp_path / "file").write_bytes(b"before" + content + b"after")
    with (tmp_path / "file").open("rb", buffering=0) as stream:
        for scratch in (Scratch(), Scratch(256)):
            assert checksum_in(stream, 6, length, scratch) == checksum_of(content)


def test_swapped_words_and_double_flips_are_noticed() -> None:
    """Changes that a sum of words misses: two words that change places, and two flipped bits of one
    column."""
    draw = random.Random(0)
    content = draw.randbytes(4096)
    good = checksum_of(content)
    for _ in range(500):
        first, second = draw.sample(range(512), 2)
        words = [content[at : at + 8] for at in range(0, 4096, 8)]
        words[first], words[second] = words[second], words[first]
        assert checksum_of(b"".join(words)) != good
        flipped = bytearray(content)
        mask = 1 << draw.randrange(8)
        flipped[first * 8] ^= mask
        flipped[second * 8] ^= mask
        assert checksum_of(flipped) != good


def test_each_changed_byte_is_noticed() -> None:
    draw = random.Random(0)
    content = draw.randbytes(600)
    good = checksum_of(content)
    for at in range(600):
        for mask in (1, 0x80, 0xFF, draw.randrange(1, 256)):
            changed = bytearray(content)
            changed[at] ^= mask
            assert checksum_of(changed) != good, (at, mask)


def test_a_file_that_ends_early_is_an_error() -> None:
    with pytest.raises(EOFError, match="ends at byte 10, not 12"):
        checksum_in(io.BytesIO(bytes(10)), 4, 8, Scratch())
