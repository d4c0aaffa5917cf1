"""Two ranks, one of which is killed at any moment of a save, however often."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedTensor,
    is_complete_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    remove_incomplete,
    save_sharded_state_dict,
)
from rank_testing import run_ranks

ROWS = 200_000
MOMENTS = 40
SAVED, REFUSED = 0, 3


def state_of(step: int, rank: int) -> dict[str, Any]:
    """A weight of which each rank has its rows, and a number."""
    rows = torch.full((ROWS, 2), float(step + rank))
    return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, 2)), "step": step}


def check_loads(path: Path, step: int) -> None:
    """Read a checkpoint of both ranks whole, in one process."""
    whole = ShardedTensor.from_rank_offsets("w", torch.zeros(2 * ROWS, 2))
    loaded = load_sharded_state_dict({"w": whole, "step": 0}, path)
    assert loaded["step"] == step
    assert (loaded["w"][:ROWS] == step).all()
    assert (loaded["w"][ROWS:] == step + 1).all()


class Pair:
    """Two ranks in forks of this process, which save once when they are told to."""

    def __init__(self, root: Path, store: Path, step: int, *, async_: bool) -> None:
        self.start_read, self.start_write = os.pipe()
        self.ready_read, self.ready_write = os.pipe()
        self.pids = [
            forked(lambda rank=rank: self._be(rank, root, store, step, async_))  # type: ignore[misc]
            for rank in range(2)
        ]
        ready = b""
        while len(ready) < 2:
            ready += os.read(self.ready_read, 2)

    def _be(self, rank: int, root: Path, store: Path, step: int, async_: bool) -> int:
        from torch import distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        state = state_of(step, rank)
        if async_:  # the first background save makes a process group
            before = store.with_name(f"{store.name}.before")
            save_sharded_state_dict({"w": 0}, before, async_=True).result(30)
        dist.barrier()
        os.write(self.ready_write, b"r")
        os.read(self.start_read, 1)
        try:
            handle = save_sharded_state_dict(state, root / f"step_{step}", async_=async_)
            if handle is not None:
                handle.result(30)
        except CheckpointingException:
            return REFUSED
        return SAVED

    def go(self) -> None:
        """Let both save."""
        os.write(self.start_write, b"go")

    def ends(self) -> list[int]:
        """Wait for both; exit codes, negative for signals."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        for end in (self.start_read, self.start_write, self.ready_read, self.ready_write):
            os.close(end)
        return codes


def forked(work: Callable[[], int]) -> int:
    """Do ``work`` in a fork, whose exit code is what it returns."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(60)  # whatever happens, it ends
    code = 99
    try:
        code = work()
    finally:
        os._exit(code)


def save_duration(root: Path, stores: Path, step: int, *, async_: bool) -> float:
    """How long the two take when nobody is killed, in seconds."""
    pair = Pair(root, stores / f"undisturbed {step}", step, async_=async_)
    started = time.perf_counter()
    pair.go()
    assert pair.ends() == [SAVED, SAVED]
    return time.perf_counter() - started


def killed_at_random_moments(folder: str, async_: bool, seed: int) -> dict[str, int]:
    root, stores = Path(folder) / "checkpoints", Path(folder) / "stores"
    stores.mkdir()
    save_sharded_state_dict(state_of(0, 0) | {"w": 0}, stores / "imports what forks need then")
    duration = min(save_duration(root, stores, step, async_=async_) for step in (3, 2, 1))
    keep_only(root, "step_1")
    draw = random.Random(seed)
    found = {"killed": 0, "published": 0, "left behind": 0, "other rank refused": 0}
    for moment in range(MOMENTS):
        victim, delay = moment % 2, draw.uniform(0, 1.2) * duration * (moment > 1)
        pair = Pair(root, stores / str(moment), 2, async_=async_)
        pair.go()
        time.sleep(delay)
        os.kill(pair.pids[victim], signal.SIGKILL)
        codes = pair.ends()
        assert codes[victim] in (-signal.SIGKILL, SAVED), codes
        assert codes[1 - victim] in (SAVED, REFUSED), codes
        found["killed"] += codes[victim] == -signal.SIGKILL
        found["other rank refused"] += codes[1 - victim] == REFUSED
        check_what_is_left(root, found)
    return found


def keep_only(root: Path, name: str) -> None:
    for entry in root.iterdir():
        if entry.name != name:
            shutil.rmtree(entry)


def check_what_is_left(root: Path, found: dict[str, int]) -> None:
    """The old checkpoint is there and loads; the new one is whole or is none."""
    check_loads(root / "step_1", 1)
    published = (root / "step_2").exists()
    expected = [root / "step_1", root / "step_2"][: 1 + published]
    assert list_checkpoints(root) == expected
    assert latest_checkpoint(root) == expected[-1]
    hidden = [entry for entry in root.iterdir() if entry not in expected]
    assert not any(map(is_complete_checkpoint, hidden))
    found["published"] += published
    found["left behind"] += bool(hidden)
    if published:
        check_loads(root / "step_2", 2)
        shutil.rmtree(root / "step_2")
    assert sorted(remove_incomplete(root)) == sorted(hidden)
    assert os.listdir(root) == ["step_1"]


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
def test_a_rank_killed_at_any_moment_leaves_the_checkpoint_before(
    tmp_path: Path, async_: bool
) -> None:
    [found] = run_ranks(killed_at_random_moments, 1, str(tmp_path), async_, 1, init=None)
    assert found["killed"] > 1
    assert found["other rank refused"] > 0
    assert found["published"] < MOMENTS
