"""The file of a rank: what is in it, where, and how it gets to storage."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

from mcore.parallel.checkpoint import (
    ShardedObject,
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.durable_files import new_large_file


def manifest_of(path: Path) -> dict[str, list[list[int]]]:
    files = json.loads((path / "manifest.json").read_text())["files"]
    return {name: record["parts"] for name, record in files.items()}


def test_elements_lie_at_places_from_which_memory_is_copied_fast(tmp_path: Path) -> None:
    odd = {f"w{size}": torch.arange(size, dtype=torch.uint8) for size in (1, 63, 64, 65, 1000)}
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in odd.items()}
    thing = ShardedObject("thing", {"a": 1}, (1,), (0,))
    save_sharded_state_dict({**shards, "thing": thing, "step": 3}, tmp_path / "saved")
    pieces = manifest_of(tmp_path / "saved")["__0_0.distcp"]
    content = (tmp_path / "saved" / "__0_0.distcp").read_bytes()
    places = [at for *_, at in pieces if at is not None]
    assert len(places) == len(odd)
    assert [at % 64 for at in places] == [0] * len(odd)
    for at, (_, value) in zip(places, sorted(odd.items()), strict=True):
        assert content[at : at + value.numel()] == bytes(value.tolist())


def test_pieces_cover_every_byte_once(tmp_path: Path) -> None:
    shards = [ShardedTensor.from_rank_offsets(f"w{i}", torch.zeros(i + 1)) for i in range(5)]
    save_sharded_state_dict({"shards": shards, "step": 3}, tmp_path / "saved")
    for name, pieces in manifest_of(tmp_path / "saved").items():
        ends = [offset + length for offset, length, *_ in pieces]
        assert [offset for offset, *_ in pieces] == [0, *ends[:-1]]
        assert ends[-1] == (tmp_path / "saved" / name).stat().st_size


def test_a_slice_of_a_large_buffer_is_saved_alone(tmp_path: Path) -> None:
    buffer = torch.arange(1_000_000.0)
    slices = {"a": buffer[10:20], "b": buffer.view(1000, 1000)[:, 3], "c": buffer[30:60].view(5, 6)}
    expected = {key: one.clone() for key, one in slices.items()}
    shards = {key: ShardedTensor.from_rank_offsets(key, one) for key, one in slices.items()}
    save_sharded_state_dict(shards, tmp_path / "saved")
    assert (tmp_path / "saved" / "__0_0.distcp").stat().st_size < 12_000
    buffer.zero_()
    loaded = load_sharded_state_dict(shards, tmp_path / "saved")
    assert all(torch.equal(loaded[key], expected[key]) for key in slices)


@pytest.mark.parametrize("advice", ["given", "refused", "unknown"])
def test_a_large_file_holds_what_was_written(
    advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(22, "Invalid argument")

    if advice == "refused":
        monkeypatch.setattr(os, "posix_fadvise", refuse)
    elif advice == "unknown":
        monkeypatch.delattr(os, "posix_fadvise")
    draw = random.Random(0)
    pieces = [draw.randbytes(size) for size in (5, 0, 20_000_000, 1, 9000, 17_000_000, 70)]
    with new_large_file(tmp_path / "file") as stream:
        for piece in pieces:
            stream.write(piece)
            assert stream.tell() == sum(map(len, pieces[: pieces.index(piece) + 1]))
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    with pytest.raises(FileExistsError):
        new_large_file(tmp_path / "file")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="copies from an accelerator")
def test_tensors_of_an_accelerator_are_as_they_were_at_the_save(tmp_path: Path) -> None:
    """Each is copied while the one before is written, behind the work that was queued before."""
    device = torch.accelerator.current_accelerator()
    tensors = {f"w{i}": torch.full((1 << 20,), float(i), device=device) for i in range(8)}
    for tensor in tensors.values():
        for _ in range(100):
            tensor.add_(1)
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    save_sharded_state_dict(shards, tmp_path / "saved")
    for tensor in tensors.values():
        tensor.zero_()
    loaded = load_sharded_state_dict(shards, tmp_path / "saved")
    assert [int(value.min()) for value in loaded.values()] == list(range(100, 108))
    assert [int(value.max()) for value in loaded.values()] == list(range(100, 108))
