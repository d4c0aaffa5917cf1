"""Processes killed at every file-system operation of a save leave only complete checkpoints."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    is_complete_checkpoint,
    keep_last,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    make_tp_sharded_tensor_for_checkpoint,
    remove_incomplete,
    save_sharded_state_dict,
)
from rank_testing import RankFailure, run_ranks

WRITING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def state_of(step: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    from torch import distributed as dist

    whole = torch.arange(64.0).reshape(8, 8) + step
    shard = make_tp_sharded_tensor_for_checkpoint(
        whole.chunk(ranks)[rank].clone(),
        "w",
        tp_group=dist.group.WORLD if ranks > 1 else None,
    )
    return {"w": shard, "step": step}


def check_loads(path: Path, step: int) -> None:
    state = state_of(-1000)
    loaded = load_sharded_state_dict(state, path)
    assert loaded["step"] == step
    assert torch.equal(loaded["w"], torch.arange(64.0).reshape(8, 8) + step)


def kill_at(is_moment: Callable[[str, tuple[Any, ...]], bool]) -> None:
    """Let this process die, without any clean-up, before the given operation."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WRITING and is_moment(event, arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child_killed_at(operation: int, root: Path, work: Callable[[], None]) -> bool:
    """Return whether ``work`` died in a fork, before its n-th operation below ``root``."""
    pid = os.fork()
    if pid == 0:
        left = [operation]

        def is_moment(event: str, arguments: tuple[Any, ...]) -> bool:
            if not str(arguments[0]).startswith(str(root)):
                return False
            left[0] -= 1
            return left[0] < 0

        try:
            kill_at(is_moment)
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def save_killed_at_each_operation(folder: str) -> tuple[int, int]:
    root = Path(folder)
    old, new = root / "step_1", root / "step_2"
    save_sharded_state_dict(state_of(1), old)
    deaths = finished = 0
    while in_child_killed_at(deaths, root, lambda: save_sharded_state_dict(state_of(2), new)):
        deaths += 1
        check_loads(old, 1)
        if new.exists():
            finished += 1
            check_loads(new, 2)
            assert list_checkpoints(root) == [old, new]
            keep_last(root, 2)
            import shutil

            shutil.rmtree(new)
        assert list_checkpoints(root) == [old]
        assert latest_checkpoint(root) == old
        remove_incomplete(root)
        assert [entry.name for entry in root.iterdir()] == ["step_1"]
    check_loads(new, 2)
    return deaths, finished


def test_save_killed_at_each_operation_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    [(deaths, finished)] = run_ranks(save_killed_at_each_operation, 1, str(tmp_path), init=None)
    assert deaths > 7
    assert finished < deaths


def test_files_and_names_are_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(
            (Path(path).name, os.path.getsize(path), sorted(os.listdir(tmp_path / "new")))
        )

    monkeypatch.setattr(os, "fsync", fsync)
    save_sharded_state_dict(state_of(1), tmp_path / "new" / "step_1")
    *before, last = synced
    assert all("step_1" not in names for *_, names in before)
    assert (last[0], last[2]) == ("new", ["step_1"])
    sizes = {name: size for name, size, _ in before}
    files = list((tmp_path / "new" / "step_1").iterdir())
    assert sorted(path.name for path in files) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert all(sizes[path.name] == path.stat().st_size for path in files)
    assert before[-1][0].startswith(".step_1.incomplete-")
    assert tmp_path.name in sizes


def syncs_of_each_rank(folder: str) -> list[str]:
    import torch.distributed as dist

    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    os.fsync = fsync
    save_sharded_state_dict(state_of(1, dist.get_rank(), 2), Path(folder) / "step_1")
    return synced


def test_each_rank_syncs_its_file_and_then_its_name(tmp_path: Path) -> None:
    """On a file system of several machines, a rank's sync says nothing of another's directory."""
    for rank, synced in enumerate(run_ranks(syncs_of_each_rank, 2, str(tmp_path))):
        after = synced[synced.index(f"__{rank}_0.distcp") + 1 :]
        assert after[0].startswith(".step_1.incomplete-")


def retention_killed_at_each_operation(folder: str) -> int:
    root = Path(folder)
    deaths = 0
    while True:
        for step in range(1, 4):
            if not (root / f"step_{step}").exists():
                save_sharded_state_dict(state_of(step), root / f"step_{step}")
        if not in_child_killed_at(deaths, root, lambda: keep_last(root, 1)):
            break
        deaths += 1
        for path in list_checkpoints(root):
            check_loads(path, int(path.name[-1]))
        assert latest_checkpoint(root) == root / "step_3"
        remove_incomplete(root)
    assert [entry.name for entry in root.iterdir()] == ["step_3"]
    return deaths


def test_retention_killed_at_each_operation_keeps_the_newest(tmp_path: Path) -> None:
    [deaths] = run_ranks(retention_killed_at_each_operation, 1, str(tmp_path), init=None)
    assert deaths > 4


MOMENTS = {
    "rank 1 opens its payload": (1, "open", ".distcp"),
    "rank 0 opens its payload": (0, "open", ".distcp"),
    "rank 0 opens the index": (0, "open", ".metadata"),
    "rank 0 opens the manifest": (0, "open", "manifest.json"),
    "rank 0 renames the directory": (0, "os.rename", "step_2"),
}


def save_with_a_death(folder: str, moment: str, async_: bool) -> None:
    from torch import distributed as dist

    rank = dist.get_rank()
    root = Path(folder)
    save_sharded_state_dict(state_of(1, rank, 2), root / "step_1")
    victim, awaited, text = MOMENTS[moment]

    def is_moment(event: str, arguments: tuple[Any, ...]) -> bool:
        name = Path(str(arguments[0])).name
        return event == awaited and text in name and "step_2" in str(arguments[0])

    if rank == victim:
        kill_at(is_moment)
    handle = save_sharded_state_dict(state_of(2, rank, 2), root / "step_2", async_=async_)
    if handle is not None:
        handle.result()


@pytest.mark.parametrize("moment", sorted(MOMENTS))
def test_death_of_a_rank_keeps_the_checkpoint_before(tmp_path: Path, moment: str) -> None:
    async_ = moment in ("rank 1 opens its payload", "rank 0 renames the directory")
    with pytest.raises(RankFailure) as caught:
        run_ranks(save_with_a_death, 2, str(tmp_path), moment, async_)
    victim = MOMENTS[moment][0]
    fates = {report.rank: report for report in caught.value.ranks}
    assert fates[victim].kind == "died"
    assert fates[1 - victim].exception_type == "CheckpointingException"
    assert list_checkpoints(tmp_path) == [tmp_path / "step_1"]
    assert not (tmp_path / "step_2").exists()
    check_loads(tmp_path / "step_1", 1)
    remove_incomplete(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]
    assert is_complete_checkpoint(tmp_path / "step_1")
