"""A save that is killed, or fails, at each of its system calls, as strace makes it happen.

The tests take a sample. ``python packages/mcore-parallel/tests/checkpoint/test_system_calls.py``
does all of them and counts.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    list_checkpoints,
    load_sharded_state_dict,
    remove_incomplete,
    save_sharded_state_dict,
)
from rank_testing import run_ranks

FAULTS = ("kill", "EIO", "ENOSPC", "EINTR")
SAMPLE = 24  # trials in the tests
SAVED, REFUSED = 0, 3
RETRIED = ("openat", "write", "fsync")  # Python repeats them after a signal
_LINE = re.compile(r"(?:\[pid +\d+\] )?(\w+)\((.*)")
_DISTURBED = re.compile(r"\(INJECTED\)|killed by SIGKILL")
_ANY_TRACER = (0x59616D61, ctypes.c_ulong(-1))  # prctl: Ubuntu's kernels allow only parents


class Call(NamedTuple):
    """A system call of a save: its name, and how often it was made, up to this time."""

    name: str
    count: int


def state_of(step: int) -> dict[str, Any]:
    whole = torch.arange(3000.0) + step
    thing = ShardedObject("o", {"step": step}, (1,), (0,))
    return {"w": ShardedTensor.from_rank_offsets("w", whole), "o": thing, "step": step}


def check_loads(path: Path, step: int) -> None:
    found = load_sharded_state_dict(state_of(-1), path)
    assert torch.equal(found["w"], torch.arange(3000.0) + step)
    assert (found["o"], found["step"]) == ({"step": step}, step)


def save_under_strace(root: Path, log: Path, *options: str) -> int:
    """Save ``step_2`` in a fork that strace attaches to first. Returns its exit code."""
    # A blocked signal starts the save: a pipe would have a read that strace counts, or not.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            ctypes.CDLL(None).prctl(*_ANY_TRACER, 0, 0, 0)
            signal.sigwait({signal.SIGUSR1})
            try:
                save_sharded_state_dict(state_of(2), root / "step_2")
                code = SAVED
            except CheckpointingException:
                code = REFUSED
        finally:
            os._exit(code)
    tracer = subprocess.Popen(
        ["strace", "-y", "-qq", "-s", "0", "-o", str(log), *options, "-p", str(pid)],
        stderr=subprocess.PIPE,
    )
    status = Path(f"/proc/{pid}/status")
    while "TracerPid:\t0\n" in status.read_text():
        assert tracer.poll() is None, tracer.stderr.read() if tracer.stderr else ""
        time.sleep(0.001)
    os.kill(pid, signal.SIGUSR1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tracer.communicate()
    return code


def list_calls(root: Path, log: Path) -> list[Call]:
    """List the system calls on files below a folder in an undisturbed save."""
    assert save_under_strace(root, log, "-e", "trace=%file,%desc") == SAVED
    shutil.rmtree(root / "step_2")
    made: Counter[str] = Counter()
    calls = []
    for line in log.read_text().splitlines():
        if match := _LINE.match(line):
            made[match[1]] += 1
            if str(root) in match[2]:
                calls.append(Call(match[1], made[match[1]]))
    return calls


def check_what_is_left(root: Path) -> bool:
    """The old checkpoint loads, the new one is whole or absent, and the next save succeeds."""
    check_loads(root / "step_1", 1)
    published = (root / "step_2").exists()
    assert [path.name for path in list_checkpoints(root)] == ["step_1", "step_2"][: 1 + published]
    if published:
        check_loads(root / "step_2", 2)
        shutil.rmtree(root / "step_2")
    remove_incomplete(root)
    assert os.listdir(root) == ["step_1"]
    save_sharded_state_dict(state_of(3), root / "step_2")
    check_loads(root / "step_2", 3)
    shutil.rmtree(root / "step_2")
    return published


def try_faults(folder: str, most: int | None) -> dict[str, int]:
    """Disturb saves at all their calls, or at ``most`` of them, and count what happened."""
    root, log = Path(folder) / "run", Path(folder) / "log"
    save_sharded_state_dict(state_of(1), root / "step_1")
    found: Counter[str] = Counter()
    calls = list_calls(root, log)
    found["calls"] = len(calls)
    for call, fault in pick_trials(calls, most):
        what = "signal=SIGKILL" if fault == "kill" else f"error={fault}"
        inject = f"inject={call.name}:{what}:when={call.count}"
        code = save_under_strace(root, log, "-e", f"trace={call.name}", "-e", inject)
        assert code in (SAVED, REFUSED, -signal.SIGKILL), (call, fault, code)
        if not _DISTURBED.search(log.read_text()):
            # The interpreter made fewer calls than in the listed save, so the fault never came.
            assert (code, check_what_is_left(root)) == (SAVED, True), (call, fault, code)
            found["undisturbed"] += 1
            continue
        assert (code == -signal.SIGKILL) == (fault == "kill"), (call, fault, code)
        if fault == "EINTR" and call.name in RETRIED:
            assert code == SAVED, (call, code)
        published = check_what_is_left(root)
        assert published or code != SAVED, (call, fault)
        found["trials"] += 1
        found["killed" if fault == "kill" else "refused" if code == REFUSED else "saved"] += 1
    return dict(found)


def pick_trials(calls: Sequence[Call], most: int | None) -> list[tuple[Call, str]]:
    """List every call with every fault, or so many calls, spread evenly, with a fault each."""
    if most is None:
        return [(call, fault) for call in calls for fault in FAULTS]
    return [(calls[n * len(calls) // most], FAULTS[n % len(FAULTS)]) for n in range(most)]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, the Debian package")
def test_a_save_that_fails_at_a_system_call_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    [found] = run_ranks(try_faults, 1, str(tmp_path), SAMPLE, init=None)
    assert found["trials"] + found.get("undisturbed", 0) == SAMPLE
    assert found.get("undisturbed", 0) < SAMPLE / 4
    assert found["calls"] > 20
    assert min(found["killed"], found["refused"], found["saved"]) > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        [counts] = run_ranks(try_faults, 1, folder, None, init=None, timeout_s=3600)
    sys.stdout.write(f"{counts}\n")
