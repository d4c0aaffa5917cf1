"""Archives inside larger files: slices that read like files, and where elements lie."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel.checkpoint.files.pieces import FileSlice, elements_at


@settings(deadline=None)
@given(
    content=st.binary(max_size=40),
    cut=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    steps=st.lists(st.tuples(st.integers(0, 50), st.integers(-1, 20)), max_size=5),
)
def test_slice_reads_like_a_file_of_its_own(
    content: bytes, cut: tuple[int, int], steps: list[tuple[int, int]]
) -> None:
    start, length = min(cut[0], len(content)), min(cut[1], max(0, len(content) - cut[0]))
    piece, expected = (
        FileSlice(io.BytesIO(content), start, length),
        io.BytesIO(content[start : start + length]),
    )
    for position, size in steps:
        assert piece.seek(position) == expected.seek(position)
        assert piece.read(size) == expected.read(size)
        assert piece.tell() == expected.tell()
    assert piece.seek(0, os.SEEK_END) == length
    with pytest.raises(ValueError, match="cannot seek"):
        piece.seek(-1)


def archive_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_elements_are_found_in_an_archive_of_one_tensor() -> None:
    tensor = torch.arange(100, dtype=torch.int32)
    content = b"x" * 37 + archive_of(tensor) + b"y" * 5
    at = elements_at(io.BytesIO(content), 37, len(content) - 42, tensor.nbytes)
    assert at is not None
    assert torch.frombuffer(bytearray(content[at : at + 400]), dtype=torch.int32).equal(tensor)
    for other in ([tensor, tensor + 1], tensor[:50], {"a": 1}):
        archive = archive_of(other)
        assert elements_at(io.BytesIO(archive), 0, len(archive), 200) is None
