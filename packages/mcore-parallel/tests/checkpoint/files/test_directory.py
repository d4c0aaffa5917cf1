"""Directories of checkpoints: order, completeness, retention, names."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    is_complete_checkpoint,
    keep_last,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    remove_incomplete,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.directory import incomplete_sibling, make_directories
from mcore.parallel.checkpoint.files.index import parse_index, read_index
from mcore.parallel.checkpoint.files.manifest import (
    Piece,
    StoredKey,
    aligned,
    encode_manifest,
)


def save(path: Path, written_at: int | None = None) -> Path:
    weight = make_sharded_tensor_for_checkpoint(torch.arange(4.0), "w")
    save_sharded_state_dict({"w": weight}, path)
    if written_at is not None:
        os.utime(path / "manifest.json", (written_at, written_at))
    return path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_order_is_that_of_the_step_numbers(tmp_path: Path) -> None:
    for name in ("step_100", "step_9", "iter_0000020"):
        save(tmp_path / name)
    assert names(list_checkpoints(tmp_path)) == ["step_9", "iter_0000020", "step_100"]
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "step_100"


def test_one_pattern_says_what_a_checkpoint_of_the_run_is(tmp_path: Path) -> None:
    for name in ("best", "ckpt_100_tp2", "step_3", "step_3.damaged", "7b-10", "7b-9"):
        save(tmp_path / name)
    assert names(list_checkpoints(tmp_path)) == ["step_3"]
    assert names(list_checkpoints(tmp_path, pattern=r"7b-(\d+)")) == ["7b-9", "7b-10"]
    assert latest_checkpoint(tmp_path, pattern=re.compile(r"7b-(\d+)")) == tmp_path / "7b-10"
    for pattern in ("(", r"(s)tep_\d+"):
        with pytest.raises(ValueError, match="pattern"):
            list_checkpoints(tmp_path, pattern=pattern)


def test_a_pattern_without_a_step_makes_time_decide(tmp_path: Path) -> None:
    save(tmp_path / "step_9", written_at=300)
    save(tmp_path / "final", written_at=200)
    save(tmp_path / "start", written_at=100)
    assert names(list_checkpoints(tmp_path, pattern=".*")) == ["start", "final", "step_9"]


def test_only_complete_checkpoints_are_listed(tmp_path: Path) -> None:
    good = save(tmp_path / "step_1")
    for name, spoil in {
        "step_2": lambda path: (path / "__0_0.distcp").unlink(),
        "step_3": lambda path: (path / ".metadata").unlink(),
        "step_4": lambda path: os.truncate(path / "__0_0.distcp", 10),
        "step_5": lambda path: (path / "manifest.json").write_text("[]"),
        "step_6": lambda path: path.rename(incomplete_sibling(path, 77)),
    }.items():
        spoil(save(tmp_path / name))
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_7").write_text("a file")
    assert list_checkpoints(tmp_path) == [good]
    assert not is_complete_checkpoint(tmp_path / "notes")
    assert not is_complete_checkpoint(tmp_path / "step_7")


def test_missing_root_has_no_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "none"
    assert (list_checkpoints(root), latest_checkpoint(root)) == ([], None)
    assert (keep_last(root, 1), remove_incomplete(root)) == ([], [])


def test_retention_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path / f"step_{step}")
    os.truncate(tmp_path / "step_5" / "__0_0.distcp", 3)
    assert names(keep_last(tmp_path, 2)) == ["step_1", "step_2"]
    assert names(list_checkpoints(tmp_path)) == ["step_3", "step_4"]
    assert names(keep_last(tmp_path, 1)) == ["step_3"]
    assert keep_last(tmp_path, 1) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_4", "step_5"]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        keep_last(tmp_path, 0)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_4"


def test_retention_leaves_links_and_other_names_alone(tmp_path: Path) -> None:
    """A link ``latest`` counted as the newest checkpoint, so that its target was deleted."""
    root = tmp_path / "run"
    for name in ("step_1", "step_2", "step_3", "step_4", "best", "ckpt_100_tp2"):
        save(root / name)
    elsewhere = save(tmp_path / "step_9")
    links = {
        "latest": root / "step_4",
        "step_5": root / "step_4",
        "step_6": elsewhere,
        ".step_7.incomplete-0123456789abcdef": elsewhere,
        "pinned": root / "step_1",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    assert names(list_checkpoints(root)) == ["step_1", "step_2", "step_3", "step_4"]
    assert keep_last(root, 1, protect=["pinned", root / "step_2"]) == [root / "step_3"]
    assert keep_last(root, 1, protect="pinned") == [root / "step_2"]
    assert remove_incomplete(root) == []
    expected = {"step_1", "step_4", "best", "ckpt_100_tp2", *links}
    assert {entry.name for entry in root.iterdir()} == expected
    assert all((root / name).is_symlink() for name in links)
    assert is_complete_checkpoint(elsewhere)
    assert keep_last(root, 1, pattern="best|ckpt_100.*") == [root / "best"]


def test_urls_that_lost_a_slash_are_refused_and_homes_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    weight = {"w": torch.zeros(2)}
    calls: list[Callable[[Any], object]] = [
        lambda path: save_sharded_state_dict(weight, path),
        lambda path: load_sharded_state_dict(weight, path),
        is_complete_checkpoint,
        list_checkpoints,
        latest_checkpoint,
        remove_incomplete,
        lambda path: keep_last(path, 1),
    ]
    for call in calls:
        with pytest.raises(CheckpointingException, match="Give a str such as 's3://bucket/step_1'"):
            call(Path("s3://bucket/step_1"))
        with pytest.raises(CheckpointingException, match="unknown user"):
            call("~nobody-of-this-name/step_1")
    assert list(tmp_path.iterdir()) == []
    save_sharded_state_dict(weight, "~/runs/step_1")
    assert list_checkpoints("~/runs") == [tmp_path / "home" / "runs" / "step_1"]
    assert is_complete_checkpoint(Path("~/runs/step_1"))
    assert os.listdir(tmp_path) == ["home"]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    left = incomplete_sibling(tmp_path / "step_2", 5)
    (left / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".step_3.incomplete-xyz").mkdir()
    assert remove_incomplete(tmp_path) == [left]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".hidden",
        ".step_3.incomplete-xyz",
        "step_1",
    ]


def test_manifest_lists_each_file_and_says_where_elements_lie(tmp_path: Path) -> None:
    path = save(tmp_path / "step_1")
    written = json.loads((path / "manifest.json").read_text())
    assert (written["format"], written["version"]) == ("mcore sharded checkpoint", 3)
    sizes = {entry.name: entry.stat().st_size for entry in path.iterdir()}
    del sizes["manifest.json"]
    assert sorted(sizes) == [".metadata", "__0_0.distcp"]
    index = read_index(path)
    assert index.files == sizes
    assert dict(index.keys).keys() == {"w"}
    assert (index.keys["w"].dtype, index.keys["w"].shape) == (torch.float32, (4,))
    [piece] = index.keys["w"].pieces
    assert (piece.start, piece.shape, piece.at + piece.span) == ((0,), (4,), sizes["__0_0.distcp"])
    assert piece.elements is not None
    content = (path / "__0_0.distcp").read_bytes()
    assert content[piece.at + piece.elements :][:16] == struct.pack("<4f", 0, 1, 2, 3)


def manifest_of_keys(number: int, shape: tuple[int, ...]) -> bytes:
    """A manifest of as many tensors of bytes, in one file."""
    keys, pieces, at = {}, [], 0
    for place in range(number):
        name = f"model.layers.{place:06}.mlp.linear_fc1.weight"
        keys[name] = StoredKey(torch.uint8, shape, ())
        length = 640 + math.prod(shape)
        whole = Piece("__0_0.distcp", at, length, length, "0" * 16, 512, (0,) * len(shape), shape)
        pieces.append((name, whole))
        at = aligned(at + length)
    return encode_manifest(keys, {"__0_0.distcp": pieces}, {})


def test_an_index_takes_little_memory_and_huge_numbers_fit(tmp_path: Path) -> None:
    """Half a million pieces took 290 MiB, of which a copy of the manifest was a quarter."""
    raw = manifest_of_keys(20_000, (64, 64))
    tracemalloc.start()
    index = parse_index(tmp_path, raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 * 240
    assert index.keys["model.layers.012345.mlp.linear_fc1.weight"].pieces[0].shape == (64, 64)
    shape = (3, 5 << 40)
    index = parse_index(tmp_path, manifest_of_keys(3, shape))
    stored = index.keys["model.layers.000002.mlp.linear_fc1.weight"]
    assert (stored.shape, stored.pieces[0].shape) == (shape, shape)
    assert stored.pieces[0].at == 2 * aligned(640 + 3 * (5 << 40))


def test_parents_are_made_and_a_link_counts_as_existing(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "b" / "step_1")
    assert is_complete_checkpoint(path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointingException, match="link already exists"):
        save(tmp_path / "link")
    with pytest.raises(NotADirectoryError, match="manifest"):
        make_directories(path / "manifest.json" / "x")


def test_relative_paths_and_trailing_slashes_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weight = make_sharded_tensor_for_checkpoint(torch.arange(4.0), "w")
    save_sharded_state_dict({"w": weight}, "step_1/")
    assert list_checkpoints(".") == [Path("step_1")]


def test_a_name_that_is_too_long_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="File name too long"):
        save(tmp_path / ("x" * 250))
    assert list(tmp_path.iterdir()) == []
