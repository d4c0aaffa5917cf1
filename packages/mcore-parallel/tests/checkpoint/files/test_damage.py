"""Whatever happened to the files, a load refuses them on all ranks and touches nothing."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    is_complete_checkpoint,
    latest_checkpoint,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.index import read_index
from rank_testing import run_ranks

UNTOUCHED = -7.0


def state_of(value: float) -> dict[str, Any]:
    """Tensors, an object and plain values, all of which depend on ``value``."""
    return {
        "w": make_sharded_tensor_for_checkpoint(torch.full((60,), value), "w"),
        "v": make_sharded_tensor_for_checkpoint(torch.full((3, 5), value).bfloat16(), "v"),
        "o": ShardedObject("o", {"a": [torch.full((2,), value)]}, (1,), (0,)),
        "common": {"n": [value, 1], "t": torch.tensor(value)},
    }


def refusal(path: Path) -> str:
    """Return the error of a load, whose targets must be unchanged."""
    targets = state_of(UNTOUCHED)
    with pytest.raises(CheckpointingException) as caught:
        load_sharded_state_dict(targets, path, verify="before")
    for name in ("w", "v"):
        assert (targets[name].data == UNTOUCHED).all()
    assert targets["common"]["t"] == UNTOUCHED
    return str(caught.value)


def offsets_to_change(path: Path, draw: random.Random) -> list[int]:
    """Random places in a file, and all around where its pieces begin and end."""
    size = path.stat().st_size
    edges = {0, size}
    for stored in read_index(path.parent).keys.values():
        for piece in stored.pieces:
            if piece.file == path.name:
                edges |= {piece.at, piece.at + (piece.elements or 0), piece.at + piece.length}
    near = {edge + step for edge in edges for step in range(-24, 40)}
    return sorted(at for at in near | set(draw.sample(range(size), 300)) if 0 <= at < size)


@contextmanager
def byte_in_place(path: Path, at: int, value: int) -> Iterator[None]:
    """Change a byte of a file for a while; where it is emptied first, the disk makes that slow."""
    with path.open("r+b", buffering=0) as stream:
        good = os.pread(stream.fileno(), 1, at)
        os.pwrite(stream.fileno(), bytes([value]), at)
        try:
            yield
        finally:
            os.pwrite(stream.fileno(), good, at)


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "__0_0.distcp"])
def test_any_changed_byte_is_refused_and_the_file_named(name: str, tmp_path: Path) -> None:
    save_sharded_state_dict(state_of(1.5), tmp_path / "step_1")
    assert sorted(os.listdir(tmp_path / "step_1")) == [".metadata", "__0_0.distcp", "manifest.json"]
    path = tmp_path / "step_1" / name
    good = path.read_bytes()
    draw = random.Random(name)
    for at in offsets_to_change(path, draw):
        with byte_in_place(path, at, good[at] ^ draw.randrange(1, 256)):
            text = refusal(tmp_path / "step_1")
        assert str(path) in text, at
        if name == "__0_0.distcp":
            assert "the content of key '" in text, at
    assert path.read_bytes() == good
    loaded = load_sharded_state_dict(state_of(UNTOUCHED), tmp_path / "step_1")
    assert (loaded["w"] == 1.5).all()


def test_each_changed_digit_of_a_manifest_has_an_error_of_the_same_words(tmp_path: Path) -> None:
    save_sharded_state_dict(state_of(1.5), tmp_path / "step_1")
    path = tmp_path / "step_1" / "manifest.json"
    good = path.read_text()
    version = good.index(": 3,") + 2
    for at, character in enumerate(good):
        if character.isdigit():
            other = "8" if character == "9" else "9"  # no number begins with a zero then
            with byte_in_place(path, at, ord(other)):
                text = refusal(tmp_path / "step_1")
            words = "another version" if at == version else "has changed since it was saved"
            assert f"{path} " in text
            assert words in text, at


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "__0_0.distcp"])
def test_a_file_of_another_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """It has the same size and is intact: only the manifest shows that it belongs elsewhere."""
    paths = [tmp_path / "step_1", tmp_path / "step_2"]
    for number, path in enumerate(paths):
        save_sharded_state_dict(state_of(number + 1.0), path)
    assert (paths[0] / name).stat().st_size == (paths[1] / name).stat().st_size
    shutil.copyfile(paths[0] / name, paths[1] / name)
    text = refusal(paths[1])
    assert "has changed since it was saved" in text
    if name == "__0_0.distcp":
        assert f"{paths[1] / name}: the content of key " in text


HARMS: dict[str, tuple[Callable[[Path, Path], Any], list[str]]] = {
    "truncated": (lambda file, _: os.truncate(file, file.stat().st_size - 1), ["truncated"]),
    "empty": (lambda file, _: os.truncate(file, 0), ["has 0 bytes", "truncated"]),
    "missing": (lambda file, _: file.unlink(), ["cannot be read (No such file"]),
    "of another checkpoint": (
        lambda file, other: shutil.copyfile(other, file),
        ["has changed since it was saved"],
    ),
    "a directory": (lambda file, _: (file.unlink(), file.mkdir()), ["is a directory"]),
    "a FIFO": (lambda file, _: (file.unlink(), os.mkfifo(file)), ["is a FIFO"]),
    "a device": (lambda file, _: (file.unlink(), file.symlink_to("/dev/zero")), ["is a device"]),
    "a dangling link": (
        lambda file, _: (file.unlink(), file.symlink_to("gone")),
        ["cannot be read (No such file or directory, though there is a link of that name"],
    ),
}


def halves(value: float) -> dict[str, Any]:
    """A row-parallel weight of which each of two ranks writes and reads its half, and values."""
    from torch import distributed as dist

    weight = torch.full((8,), value)
    shard = make_tp_sharded_tensor_for_checkpoint(weight, "half", tp_group=dist.group.WORLD)
    return {"half": shard, "n": 3}


def harmed_on_two_ranks(folder: str) -> dict[str, tuple[str, bool]]:
    from torch import distributed as dist

    root, rank = Path(folder), dist.get_rank()
    save_sharded_state_dict(halves(1.0 + rank), root / "good")
    save_sharded_state_dict(halves(5.0 + rank), root / "other")
    outcomes = {}
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"):
        for harm, (spoil, _) in HARMS.items():
            path = root / f"{harm} {name}"
            if rank == 0:
                shutil.copytree(root / "good", path)
                spoil(path / name, root / "other" / name)
            dist.barrier()
            target = halves(UNTOUCHED)
            assert is_complete_checkpoint(path) <= (harm == "of another checkpoint")
            try:
                load_sharded_state_dict(target, path, verify="before")
                text = "no error"
            except CheckpointingException as error:
                text = str(error)
            outcomes[path.name] = (text, bool((target["half"].data == UNTOUCHED).all()))
    return outcomes


def test_harm_to_any_file_is_one_error_on_both_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(harmed_on_two_ranks, 2, str(tmp_path))
    assert first == second
    assert len(first) == 4 * len(HARMS)
    for case, (text, untouched) in first.items():
        name = case.rpartition(" ")[2]
        assert untouched, case
        if case != "of another checkpoint manifest.json":  # it accuses the others
            assert str(tmp_path / case / name) in text, (case, text)
        if name.endswith(".distcp"):
            words = HARMS[case.removesuffix(f" {name}")][1]
            key = "'half'" if name == "__1_0.distcp" else "key '"
            assert [word for word in [*words, key] if word not in text] == [], (case, text)
    assert latest_checkpoint(tmp_path / "none") is None


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    as_root = ["sudo", "-n"] if os.geteuid() and shutil.which("sudo") else []
    mount = [*as_root, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root; files that may not grow are tested anyway")
    try:
        yield disk
    finally:
        subprocess.run([*as_root, "umount", "-l", str(disk)], check=True)


def saves_that_fail(folder: str, large_on: int, as_user: int | None) -> tuple[list[str], bool]:
    """Save a good checkpoint, then fail to save another, at once and in the background."""
    from torch import distributed as dist

    root, rank = Path(folder), dist.get_rank()
    # In the background, since a process group for it cannot be made as another user.
    save_sharded_state_dict(halves(1.0 + rank), root / "step_1", async_=True).result()
    if as_user is not None:
        dist.barrier()
        root.chmod(0o555)
        os.seteuid(as_user)
    large = torch.ones(1_000_000 if rank == large_on else 1)
    state = halves(2.0) | {"large": ShardedTensor.from_rank_offsets(f"large.{rank}", large)}
    texts = []
    for async_ in (False, True):
        try:
            handle = save_sharded_state_dict(state, root / "step_2", async_=async_)
            if handle is not None:
                handle.result()
            texts.append("no error")
        except CheckpointingException as error:
            texts.append(str(error))
        dist.barrier()
    loaded = load_sharded_state_dict(halves(UNTOUCHED), root / "step_1")
    os.seteuid(os.getuid())  # only the first user may write this rank's outcome to its file
    return texts, bool((loaded["half"] == 1.0 + rank).all())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_one_error_that_names_file_and_key(tiny_disk: Path, rank: int) -> None:
    first, second = run_ranks(saves_that_fail, 2, str(tiny_disk), rank, None)
    assert first == second
    texts, is_loadable = first
    for text in texts:
        assert f"rank {rank}: " in text
        assert f"__{rank}_0.distcp cannot be written at key 'large.{rank}'" in text
        assert "[Errno 28] No space left on device" in text
    assert is_loadable
    assert os.listdir(tiny_disk) == ["step_1"]


def test_a_read_only_directory_is_one_error_that_names_it() -> None:
    nobody = 65534 if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        root.mkdir()
        Path(folder).chmod(0o755)
        user = nobody if nobody is not None else os.geteuid()
        first, second = run_ranks(saves_that_fail, 2, str(root), 0, user)
        assert first == second
        texts, is_loadable = first
        for text in texts:
            assert f"[Errno 13] Permission denied: '{root}/.step_2.incomplete-" in text
        assert is_loadable
        assert os.listdir(root) == ["step_1"]
        root.chmod(0o755)
