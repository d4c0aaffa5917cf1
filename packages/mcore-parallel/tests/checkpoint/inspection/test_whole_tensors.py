"""Tensors with holes are refused by loads and commands, which end with documented exit codes."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.__main__ import main
from rank_testing.scripts import run_script

LIMITED = """
import resource, sys
from pathlib import Path
import mcore.parallel.checkpoint.inspection.listing
from mcore.parallel.checkpoint.__main__ import main
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
sys.exit(main(sys.argv[1:]))
"""


def save_two_shards(path: Path) -> None:
    shards = [
        ShardedTensor("w", torch.tensor(values), torch.float32, (3,), (6,), (at,), None)
        for at, values in ((0, [1.0, 2.0, 3.0]), (3, [4.0, 5.0, 6.0]))
    ]
    save_sharded_state_dict(dict(zip("ab", shards, strict=True)), path)


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change a manifest and give it the checksum that it then needs."""
    raw = (path / "manifest.json").read_text()
    lines = json.loads(raw)["content"]
    change(lines)
    text = raw[: raw.index("\n") + 1] + ",\n".join(map(json.dumps, lines)) + "\n"
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    (path / "manifest.json").write_text(f'{text}], "checksum": "{digest}"' + "}\n")


def overlap(lines: list[dict[str, Any]]) -> None:
    """Elements 1 to 2 twice, and 4 to 5 not at all: as many elements as the tensor has."""
    assert lines[2]["boxes"] == [0, 3, 3, 3]
    lines[2]["boxes"] = [0, 3, 1, 3]


def enlarge(lines: list[dict[str, Any]]) -> None:
    lines[1]["shapes"] = [1 << 50]


@pytest.mark.parametrize(
    ("change", "problem"), [(overlap, "its pieces overlap"), (enlarge, "have 6 of")]
)
def test_holes_are_refused(
    change: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "step_1", tmp_path / "one.pt"
    save_two_shards(path)
    assert main(["verify", str(path)]) == 0
    rewrite(path, change)
    target = torch.full((6,), -7.0)
    with pytest.raises(CheckpointingException, match="'w': "):
        load_sharded_state_dict({"w": target}, path)
    assert (target == -7).all()
    capsys.readouterr()
    assert main(["verify", str(path)]) == 1
    assert problem in capsys.readouterr().out
    assert main(["to-torch", str(path), str(file)]) == 2
    assert problem in capsys.readouterr().err
    assert main(["diff", str(path), str(path)]) == 2
    assert not file.exists()


def put_outside(lines: list[dict[str, Any]]) -> None:
    lines[2]["boxes"] = [0, 3, 4, 3]


def test_a_piece_outside_of_its_tensor_is_damage_of_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_two_shards(tmp_path / f"step_{step}")
    rewrite(tmp_path / "step_1", put_outside)
    with pytest.raises(CheckpointingException, match="do not fit its shape"):
        load_sharded_state_dict({"w": torch.zeros(6)}, tmp_path / "step_1")
    assert main(["verify", str(tmp_path), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (first["ok"], second["ok"]) == (False, True)
    [damage] = first["damaged"]
    assert "key 'w': its pieces do not fit its shape (6,)" in damage["problem"]


def test_a_full_disk_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_sharded_state_dict({"w": torch.zeros(1 << 20)}, tmp_path / "step_1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert main(["to-torch", str(tmp_path / "step_1"), str(tmp_path / "one.pt")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'one.pt'} cannot be written (OSError: [Errno 27] File too large)\n"
    )
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_lack_of_memory_is_no_damage(tmp_path: Path) -> None:
    value = torch.zeros(32 << 20)
    save_sharded_state_dict({"w": value}, tmp_path / "step_1")
    paths = [str(tmp_path / "step_1"), str(tmp_path / "one.pt")]
    done = run_script(LIMITED, "to-torch", *paths)
    assert done.returncode == 2
    assert done.stderr.startswith("error: out of memory: ")
    assert os.listdir(tmp_path) == ["step_1"]


def test_the_written_file_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_two_shards(tmp_path / "step_1")
    synced: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    assert main(["to-torch", str(tmp_path / "step_1"), str(tmp_path / "one.pt")]) == 0
    file, folder = synced
    assert file.startswith(str(tmp_path / ".one.pt.incomplete-"))
    assert folder == str(tmp_path)
    assert torch.load(tmp_path / "one.pt")["w"].tolist() == [1, 2, 3, 4, 5, 6]


def test_an_error_of_the_program_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_two_shards(tmp_path / "step_1")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(torch, "save", fail)
    assert main(["to-torch", str(tmp_path / "step_1"), str(tmp_path / "one.pt")]) == 2
    assert "error: ZeroDivisionError" in capsys.readouterr().err
