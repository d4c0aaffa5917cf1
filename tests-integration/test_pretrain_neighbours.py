"""A neighbour on the machine or network of a run, who has no access to the user's files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pretrain.cli import launch
from pretrain.cli.claim import check_unclaimed
from pretrain.cli.handshake import LAUNCHER, PRIVATE_FOLDER
from pretrain.run.checkpoints import latest_step
from pretrain.run_folder import RunFolder
from pretrain_runs import (
    ENDLESS,
    TINY,
    environment,
    losses_of,
    pretrain,
    ranks_below,
    ranks_of,
    records_of,
    started,
    wait_until,
)
from rank_testing.scripts import Script

# Puts a pickle in the rendezvous, if there is a store at the port.
ATTACK = """
import base64, pickle, subprocess, sys
from torch.distributed import TCPStore
port, run_id, file = sys.argv[1:]
class Payload:
    def __reduce__(self):
        return subprocess.call, (["touch", file],)
store = TCPStore("127.0.0.1", int(port), is_master=False)
store.set(f"torch.rendezvous.{run_id}", base64.b64encode(pickle.dumps(Payload())))
print("accepted", flush=True)
"""
# A server of another kind never answers the attack. Longer than a launcher needs to read a key.
PATIENCE_S = 20
WORDS = (
    *TINY, *ENDLESS, "--no-mlflow", "--no-tensorboard", "--save-interval", "0",
    "--run-dir", "run", "--log-interval", "1",
)  # fmt: skip


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Script]:
    """A run after its first steps."""
    with started(folder, *WORDS) as job:
        metrics = folder / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(records_of(folder / "run")) > 2)
        yield job


def variable_of(job: Script, folder: Path, name: str) -> str:
    """A variable with which the launcher has started a rank."""
    return str(ranks_of(job, folder)[0]["env"][name])


def listening(pid: int) -> set[tuple[str, int]]:
    """Every address at which a process listens, as the kernel writes it, and the port."""
    listed = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == "0A":
                listed[words[9]] = (address, int(port, 16))
    links = []
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(name))
    inodes = [found[1] for link in links if (found := re.match(r"socket:\[(\d+)\]", link))]
    return {listed[inode] for inode in inodes if inode in listed}


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_neighbours_reach_nothing_of_a_run_which_saves_at_its_end_and_continues(
    tmp_path: Path,
) -> None:
    """It opens nothing on the network, no neighbour runs code in it, no second job continues it."""
    marker, folder = tmp_path / "owned", RunFolder(tmp_path / "run")
    with training(tmp_path) as job:
        ranks = ranks_below(job, tmp_path)
        pids = [job.pid, *ranks.values()]
        assert len(pids) == 3
        found = {pid: listening(pid) for pid in pids}
        assert not found[job.pid]
        opened = set().union(*found.values())
        # 127.0.0.1 alone: gloo's connections and the controller of the straggler detector.
        assert {address for address, _ in opened} == {"0100007F"}
        run_id = variable_of(job, tmp_path, "TORCHELASTIC_RUN_ID")
        attacks = [Script(ATTACK, str(port), run_id, str(marker)) for _, port in opened]
        time.sleep(PATIENCE_S)
        assert not any("accepted" in one.printed for one in attacks)
        for one in attacks:
            one.send(signal.SIGKILL)
        private = Path(variable_of(job, tmp_path, PRIVATE_FOLDER))
        assert private.stat().st_mode & 0o777 == 0o700
        refused = pretrain(tmp_path, "--resume", "run", "--train-iters", "200000")
        before = len(records_of(folder.path))
        wait_until(lambda: len(records_of(folder.path)) > before + 2)
        job.send(signal.SIGTERM)
        ended = job.wait(600)
    assert not marker.exists()
    assert not private.exists()
    assert refused.returncode == 2
    assert refused.stderr == (
        "pretrain: error: run is in use by another job "
        f"(host {socket.gethostname()}, process {ranks[0]})\n"
    )
    assert ended.returncode == 128 + signal.SIGTERM
    last = latest_step(folder)
    assert len(losses_of(folder.path)) == last
    assert ended.stderr.splitlines() == [
        "pretrain: interrupted by SIGTERM; all ranks ended. The last complete checkpoint is "
        f"run/checkpoints/step_{last:08d}. Continue with: hatch run pretrain --resume run"
    ]
    done = pretrain(tmp_path, "--resume", "run", "--train-iters", str(last + 2))
    assert done.returncode == 0, done.stderr
    assert len(losses_of(folder.path)) == last + 2


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_claim_or_temporary_folder(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        ranks = ranks_below(job, tmp_path)
        private = Path(variable_of(job, tmp_path, PRIVATE_FOLDER))
        assert (private / "ranks").exists()
        job.send(signal.SIGKILL)
        wait_until(lambda: not private.exists())
    assert len(ranks) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()))
    check_unclaimed(tmp_path / "run")


@pytest.mark.slow
def test_ranks_whose_launcher_dies_while_they_start_do_not_train(tmp_path: Path) -> None:
    with started(tmp_path, *WORDS) as job:
        wait_until(lambda: len(ranks_below(job, tmp_path)) == 2, every_s=0.01)
        private = Path(variable_of(job, tmp_path, PRIVATE_FOLDER))
        ranks = ranks_below(job, tmp_path).values()
        job.send(signal.SIGKILL)
        job.wait()
        for rank in ranks:
            stat = Path(f"/proc/{rank}/stat")
            wait_until(lambda stat=stat: not stat.exists() or ") Z " in stat.read_text())
    assert not private.exists()


def test_a_rank_ends_if_its_launcher_is_dead_but_not_yet_reaped(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # its number stays in use
        rank = Script(
            "import time; from pretrain.cli.ending import Ending; Ending(300.0); time.sleep(600)",
            cwd=tmp_path, env={**environment(), LAUNCHER: str(launcher.pid)},
        )  # fmt: skip
        assert rank.wait(600).returncode == 128 + signal.SIGHUP


def test_the_last_rank_removes_the_private_folder_and_a_later_one_ends(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    code = "import time; from pretrain.cli.ending import Ending; Ending(300.0); time.sleep(600)"
    env = {**environment(), LAUNCHER: str(os.getppid()), PRIVATE_FOLDER: str(private)}
    held = os.open(private, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)  # as a rank does that makes its store there
    for is_there in (True, False, False):
        rank = Script(code, cwd=tmp_path, env=env)
        assert rank.wait(600).returncode == 128 + signal.SIGHUP
        assert private.exists() == is_there
        fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def test_the_environment_for_ranks_ends_with_the_launch() -> None:
    before = dict(os.environ)
    with launch._stay_on_this_machine() as private:
        assert os.environ[PRIVATE_FOLDER] == str(private)
    assert dict(os.environ) == before
    assert not private.exists()


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")])
def test_the_store_outside_the_agents_listens_on_the_address_that_it_is_given(
    host: str, address: str, tmp_path: Path
) -> None:
    store = Script(
        "from pretrain.cli.store import main; import sys; main(sys.argv[1:])",
        host, "0", cwd=tmp_path, env=environment(),
    )  # fmt: skip
    try:
        wait_until(lambda: any(True for _ in listening(store.pid)))
        [(found, port)] = listening(store.pid)
        assert found == address
        client = TCPStore("127.0.0.1", port, is_master=False)
        client.set("name", "value")
        assert client.get("name") == b"value"
    finally:
        store.send(signal.SIGKILL)
