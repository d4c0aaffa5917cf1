"""Two ranks, one of which is killed at some call in a save, from its first to its last."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
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

ROWS = 5_000
MOMENTS_PER_RANK = 12
SAVED, REFUSED = 0, 3
SOURCES = os.path.join("mcore", "parallel", "")


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


class Calls:
    """Counts the calls of the package's functions, in all threads; the process dies at one."""

    def __init__(self, fatal: int | None) -> None:
        self.fatal = fatal
        self.made = 0
        self._numbers = itertools.count(1)

    def count(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and SOURCES in frame.f_code.co_filename:
            number = next(self._numbers)
            self.made = max(number, self.made)
            if number == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], int]) -> int:
    """Do ``work`` in a fork, whose exit code is what it returns."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(300)  # whatever happens, it ends
    code = 99
    try:
        code = work()
    finally:
        os._exit(code)


def save_as_one_of_two(
    rank: int, root: Path, store: Path, step: int, async_: bool, calls: Calls
) -> int:
    from torch import distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    state = state_of(step, rank)
    if async_:  # the first background save makes a process group
        before = store.with_name(f"{store.name}.before")
        save_sharded_state_dict({"w": 0}, before, async_=True).result()
    dist.barrier()
    calls.count()
    try:
        handle = save_sharded_state_dict(state, root / f"step_{step}", async_=async_)
        if handle is not None:
            handle.result()
    except CheckpointingException:
        return REFUSED
    store.with_name(f"{store.name}.calls{rank}").write_text(str(calls.made))
    return SAVED


def save_in_forks(
    root: Path, store: Path, step: int, async_: bool, fatal: dict[int, int]
) -> list[int]:
    """Save on two ranks, which die at the given calls; exit codes, negative for signals."""
    pids = []
    for rank in range(2):
        calls = Calls(fatal.get(rank))
        one = (rank, root, store, step, async_, calls)
        pids.append(forked(lambda one=one: save_as_one_of_two(*one)))  # type: ignore[misc]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def killed_at_calls(folder: str, async_: bool) -> dict[str, int]:
    root, stores = Path(folder) / "checkpoints", Path(folder) / "stores"
    root.mkdir()
    stores.mkdir()
    state = {"w": torch.ones(1), "step": 0}
    save_sharded_state_dict(state, stores / "imports and tries what forks need then")
    assert save_in_forks(root, stores / "undisturbed", 1, async_, {}) == [SAVED, SAVED]
    found = {"published": 0, "left behind": 0, "other rank refused": 0}
    for victim in range(2):
        calls = int((stores / f"undisturbed.calls{victim}").read_text())
        assert calls > MOMENTS_PER_RANK
        for moment in range(MOMENTS_PER_RANK):
            fatal = 1 + (calls - 1) * moment // (MOMENTS_PER_RANK - 1)
            store = stores / f"{victim} {moment}"
            codes = save_in_forks(root, store, 2, async_, {victim: fatal})
            assert codes[victim] == -signal.SIGKILL, (codes, fatal)
            assert codes[1 - victim] in (SAVED, REFUSED), (codes, fatal)
            found["other rank refused"] += codes[1 - victim] == REFUSED
            check_what_is_left(root, found)
    return found


def check_what_is_left(root: Path, found: dict[str, int]) -> None:
    """The old checkpoint loads; the new one is complete or absent."""
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
def test_a_rank_killed_at_any_call_leaves_the_checkpoint_before(
    tmp_path: Path, async_: bool
) -> None:
    [found] = run_ranks(killed_at_calls, 1, str(tmp_path), async_, init=None, timeout_s=600)
    assert 0 < found["published"] < 2 * MOMENTS_PER_RANK
    assert found["other rank refused"] > 0
    assert found["left behind"] > 0
