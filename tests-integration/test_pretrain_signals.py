"""Signals to the command that a user typed, and to process 1 of a container: the job saves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pretrain.run.checkpoints import latest_step
from pretrain.run_folder import RunFolder
from pretrain_runs import (
    ENDLESS,
    TINY,
    TOOLS,
    curve_of,
    environment,
    forking,
    launcher,
    wait_until,
)
from rank_testing import free_port
from rank_testing.scripts import Script

WORDS = (*TINY, *ENDLESS, "--no-mlflow", "--no-tensorboard", "--save-interval", "0")
HATCH = ("hatch", "run", f"{os.environ.get('HATCH_ENV_ACTIVE', 'default')}:pretrain")
# Goes on as a container's process 1: signals without a handler do not reach it. The first process
# waits for it. As by unshare --user --map-root-user --pid --fork.
CONTAINER = """
import ctypes, os, sys
ids = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000 | 0x20000000) == 0  # new users, new processes
for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1"), ("gid_map", "0 %d 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text % ids[name == "gid_map"] if "%" in text else text)
if process_1 := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(process_1, 0)[1]))
"""


@contextlib.contextmanager
def running(
    words: Sequence[str], cwd: Path, folder: Path, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own, wait for some steps, and end what it leaves."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            words, cwd=cwd, env={**environment(), **env}, stdout=output, stderr=output,
            start_new_session=True,
            # nohup, under which someone may run the tests, makes all programs ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )  # fmt: skip
    try:
        metrics = folder / "run" / "metrics.jsonl"
        wait_until(lambda: process.poll() is not None or lines_in(metrics) > 5)
        assert process.poll() is None, (folder / "output").read_text()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lines_in(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def members_of(group: int) -> set[int]:
    """The processes of a group that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.add(int(path.parent.name))
    return found


def assert_saved(folder: Path) -> None:
    run = RunFolder(folder / "run")
    assert list(curve_of(run.path, "lm loss")) == list(range(1, latest_step(run) + 1))


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_the_job_saves_when_hatch_is_ended_alone(tmp_path: Path) -> None:
    """By any signal that hatch has no handler for: the job sees none of them, only its end."""
    with running(
        [*HATCH, *WORDS, "--run-dir", str(tmp_path / "run")], TOOLS.parent, tmp_path
    ) as hatch:
        [launcher] = children_of(hatch.pid)
        assert len(children_of(launcher)) >= 2
        status = Path(f"/proc/{hatch.pid}/status").read_text()
        for kept in re.findall(r"^Sig(?:Ign|Cgt):\t(\w+)$", status, re.MULTILINE):
            assert not int(kept, 16) & (1 << signal.SIGTERM - 1 | 1 << signal.SIGHUP - 1)
        hatch.send_signal(signal.SIGTERM)
        assert hatch.wait(600) == -signal.SIGTERM
        wait_until(lambda: not members_of(hatch.pid))
    assert_saved(tmp_path)
    assert "pretrain: interrupted by SIGTERM; all ranks ended." in (tmp_path / "output").read_text()


@pytest.mark.slow
def test_ctrl_c_to_the_printed_command_saves_and_ends_with_130(tmp_path: Path) -> None:
    with running(
        [*HATCH, *WORDS, "--run-dir", str(tmp_path / "run")], TOOLS.parent, tmp_path
    ) as hatch:
        os.killpg(hatch.pid, signal.SIGINT)
        assert hatch.wait(600) == 130
        assert not members_of(hatch.pid)
    assert_saved(tmp_path)


def command_of_the_cluster(folder: Path) -> Script:
    """The command of ``kubernetes.yaml`` with its variables, for one pod with two ranks."""
    (folder / "bin").mkdir()
    hatch = folder / "bin" / "hatch"
    hatch.write_text(f"#!/bin/sh\n[ \"$*\" = 'env find' ] && echo {sys.prefix}\n")
    hatch.chmod(hatch.stat().st_mode | stat.S_IXUSR)
    text = (TOOLS / "pretrain" / "cluster" / "kubernetes.yaml").read_text()
    job = list(YAML(typ="safe").load_all(text))[2]
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    moved = {"/runs/first": str(folder / "run")}
    arguments = [moved.get(word, word) for word in container["args"]]
    env = {
        **forking(folder),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]), "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",  # as long as the ranks' grace
    }  # fmt: skip
    words = (*container["command"], *arguments, *WORDS)
    code = f"import os\nos.setsid()\n{CONTAINER}\nos.execvp(sys.argv[1], sys.argv[1:])"
    return Script(code, *words, cwd=folder, env=env)


def own_command(folder: Path) -> Script:
    return launcher(folder, "pretrain", *WORDS, "--run-dir", "run", first=CONTAINER)


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
@pytest.mark.parametrize("start", [own_command, command_of_the_cluster])
def test_process_1_of_a_container_saves_at_sigterm(
    start: Callable[[Path], Script], tmp_path: Path
) -> None:
    container = start(tmp_path)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: not container.is_running or lines_in(metrics) > 5)
        assert container.is_running, container.wait()
        [first] = children_of(container.pid)
        os.kill(first, signal.SIGTERM)
        done = container.wait(600)
        wait_until(lambda: not members_of(container.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(container.pid, signal.SIGKILL)
    code = done.returncode
    assert code == 128 + signal.SIGTERM if start is own_command else code, done
    assert_saved(tmp_path)
