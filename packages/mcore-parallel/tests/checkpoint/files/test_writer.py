"""The file of a rank: what is in it, where, and how it gets to storage."""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    ShardedObject,
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.directory import new_large_file


def pieces_of(path: Path) -> list[dict[str, Any]]:
    """The pieces of the only payload file, as the manifest, plain JSON, describes them."""
    lines = json.loads((path / "manifest.json").read_text())["content"]
    [keys], [block] = ([line for line in lines if name in line] for name in ("dtypes", "file"))
    assert block["file"] == "__0_0.distcp"
    pieces, at = [], block["at"]
    for key, length, elements in zip(
        block["keys"], block["lengths"], block["elements"], strict=True
    ):
        piece = {"key": keys["keys"][key], "at": at, "length": length, "elements": at + elements}
        pieces.append(piece | {"dtype": keys["dtypes"][key]})
        at = -(-(at + length) // 64) * 64
    return pieces


def test_elements_lie_at_places_from_which_memory_is_copied_fast(tmp_path: Path) -> None:
    odd = {f"w{size}": torch.arange(size, dtype=torch.uint8) for size in (1, 63, 64, 65, 1000)}
    odd["large"] = torch.arange(1 << 21).to(torch.uint8)  # written in another way
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in odd.items()}
    thing = ShardedObject("thing", {"a": 1}, (1,), (0,))
    save_sharded_state_dict({**shards, "thing": thing, "step": 3}, tmp_path / "saved")
    content = (tmp_path / "saved" / "__0_0.distcp").read_bytes()
    found = {piece["key"]: piece for piece in pieces_of(tmp_path / "saved")}
    assert found.keys() == {*odd, "thing/shard_0_1", "step"}
    for key, value in odd.items():
        at = found[key]["elements"]
        assert at % 64 == 0
        assert content[at : at + value.numel()] == bytes(value.tolist())


def test_pieces_are_archives_that_torch_and_zip_read(tmp_path: Path) -> None:
    sizes = (0, 1, 5, 300_000)  # the last one is written by torch.save itself
    tensors = {f"w{size}": torch.arange(float(size)) for size in sizes}
    save_sharded_state_dict({**tensors, "scalar": torch.tensor(3)}, tmp_path / "saved")
    content = (tmp_path / "saved" / "__0_0.distcp").read_bytes()
    pieces = pieces_of(tmp_path / "saved")
    for piece in pieces:
        archive = content[piece["at"] : piece["at"] + piece["length"]]
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            assert opened.testzip() is None
        value = torch.load(io.BytesIO(archive))
        assert torch.equal(value, tensors.get(piece["key"], torch.tensor(3)))
    between = set(range(len(content)))
    for piece in pieces:
        between -= set(range(piece["at"], piece["at"] + piece["length"]))
    assert {content[at] for at in between} <= {0}
    assert pieces[-1]["at"] + pieces[-1]["length"] == len(content)


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
