"""The batch file under a Slurm of two nodes on this machine, disturbed in every way it handles.

``hatch run dev:python -m faults.slurm [node|launcher|limit|diverged|refused|cancelled ...]``: a
job that is requeued has to go on from the last checkpoint and end like an undisturbed run, one
that cannot succeed has to stay ended. Exit codes: 0, 1 where it does not, 77 without Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from faults.deck import Variant
from faults.machine import MARK, end_all_with_this_process, processes_with
from faults.verdict import differences, newest_good, points_of
from rank_testing.ports import free_port

_BATCH = Path(__file__).parents[1] / "pretrain" / "cluster" / "slurm.sbatch"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")
_EXIT_SKIPPED = 77
_TIMEOUT_S = 30.0
_JOB = Variant(
    "slurm",
    "--dp 2 --no-tensorboard --train-iters 160 --save-interval 10 --eval-interval 50 "
    "--log-interval 50",
)
_KILLED_AFTER = 20
_LOOK_EVERY_S = 0.1
_PENDING_S = 3.0
_LONGEST_S = 900.0
_CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def main() -> int:
    """Run the batch file undisturbed, then in each case that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m faults.slurm")
    parser.add_argument("case", nargs="*", choices=[[], *_CASES], metavar="CASE")
    chosen = parser.parse_args().case or list(_CASES)
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        print(f"skipped: {', '.join(missing)} not found (Debian, Ubuntu: apt install slurm-wlm)")
        return _EXIT_SKIPPED
    os.environ["PATH"] = path
    end_all_with_this_process()
    for number in (signal.SIGINT, signal.SIGTERM):  # which step daemons would outlive
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="faults-slurm-"))
    with _Cluster(folder) as cluster:
        wrong = list(_wrong_in(cluster, chosen))
    for problem in wrong:
        print(f"PROBLEM: {problem}; see {folder}")
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _wrong_in(cluster: _Cluster, chosen: list[str]) -> Iterator[str]:
    """Run the job once as it is and once for each case; what is wrong then."""
    reference = cluster.folder / "undisturbed"
    job = cluster.submit(reference)
    cluster.wait_for_the_end(job)
    _say(f"undisturbed, the job is {cluster.state_of(job)}")
    for case in chosen:
        for problem in _CASES[case](cluster, reference, cluster.folder / case):
            yield f"{case}: {problem}"


def _node(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A node is killed: Slurm requeues the job."""
    job, before = _started(cluster, run)
    killed_at = time.time()
    cluster.kill_node("n2")
    _say(f"node n2 was killed after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "Slurm to notice that a node is gone")
    cluster.start_node("n2")
    _say(f"node n2 is back, the job is {cluster.state_of(job)}")
    yield from _wrong_at_the_end(cluster, job, reference, run, before, killed_at, at_once=False)


def _launcher(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A rank is killed, then a launcher, on nodes that live: torchrun, then the batch file."""
    job, before = _started(cluster, run)
    _kill([pid for pid in cluster.tasks_of("n2") if _has(pid, "environ", b"\0RANK=")])
    _say(f"the rank of node n2 was killed after step {before}")
    _wait(lambda: newest_good(run) >= before + _KILLED_AFTER, "later checkpoints")
    if cluster.restarts_of(job):
        yield "the job was requeued for a rank that torchrun can start again"
    before, killed_at = newest_good(run), time.time()
    _kill([pid for pid in cluster.tasks_of("n2") if _has(pid, "cmdline", b"distributed.run")])
    _say(f"the launcher of node n2 was killed after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "the job's end after that of a launcher")
    yield from _wrong_at_the_end(cluster, job, reference, run, before, killed_at)


def _limit(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """The time limit comes near: the job saves, ends and is requeued."""
    # Slurm looks at the limits twice a minute, in which a quick machine would be done.
    job, before = _started(cluster, run, "--slow-rank", "1:60")
    cluster.limit(job, "1")
    _say(f"the time limit was lowered after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "the job's end before its time limit")
    ended_at, before = time.time(), newest_good(run)
    _say(f"the job is {cluster.state_of(job)}, saved at step {before}")
    if before % 10 == 0:
        yield f"the newest checkpoint is the regular one of step {before}"
    _wait(lambda: cluster.state_of(job) != "COMPLETING", "the job to be pending")
    cluster.limit(job, "60")
    yield from _wrong_at_the_end(cluster, job, reference, run, before, ended_at)


def _diverged(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A run that diverges behind a checkpoint stays ended."""
    options = "--lr 1e30 --min-lr 1 --warmup-iters 0 --save-interval 1 --max-skipped 3"
    yield from _stays_ended(cluster, run, options, 1, "not finite")


def _refused(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A run that cannot go on as it is asked to stays ended."""
    shutil.copytree(reference, run)
    options, last = "--tp 3 --train-iters 320", newest_good(reference)
    yield from _stays_ended(cluster, run, options, last, "pretrain: error: ")


def _stays_ended(cluster: _Cluster, run: Path, options: str, last: int, said: str) -> Iterator[str]:
    job = cluster.submit(run, options.split())
    cluster.wait_for_the_end(job)
    _say(f"with {options}, the job is {cluster.state_of(job)}")
    yield from _wrong_ending(cluster, job, "FAILED")
    if said not in Path(f"{run}.said").read_text():
        yield f"the output does not say {said!r}"
    if newest_good(run) != last:
        yield f"the newest checkpoint is that of step {newest_good(run)}"


def _cancelled(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A run that somebody cancels stays ended, and has saved."""
    job, before = _started(cluster, run)
    cluster.cancel(job)
    cluster.wait_for_the_end(job)
    _say(f"cancelled after step {before}, saved at step {newest_good(run)}")
    yield from _wrong_ending(cluster, job, "CANCELLED")


def _wrong_ending(cluster: _Cluster, job: str, wanted: str) -> Iterator[str]:
    if (state := cluster.state_of(job)) != wanted:
        yield f"the job is {state}, not {wanted}"
    if cluster.restarts_of(job):
        yield f"the job was requeued {cluster.restarts_of(job)} times"


_CASES = {
    "node": _node, "launcher": _launcher, "limit": _limit,
    "diverged": _diverged, "refused": _refused, "cancelled": _cancelled,
}  # fmt: skip


def _started(cluster: _Cluster, run: Path, *more: str) -> tuple[str, int]:
    """A job in the middle of its steps, and the step that it has saved."""
    job = cluster.submit(run, more)
    _wait(lambda: newest_good(run) >= _KILLED_AFTER, "first checkpoints")
    return job, newest_good(run)


def _wrong_at_the_end(
    cluster: _Cluster,
    job: str,
    reference: Path,
    run: Path,
    before: int,
    at: float,
    *,
    at_once: bool = True,
) -> Iterator[str]:
    """Wait for a job that was disturbed after a step had been saved; what is wrong then."""
    cluster.wait_for_the_end(job, at_once=at_once)
    _say(f"the job is {cluster.state_of(job)} after {time.time() - at:.0f} s")
    if cluster.restarts_of(job) != 1:
        yield f"the job was requeued {cluster.restarts_of(job)} times, not once"
    yield from differences(run, reference, None)
    again = [point for point, _ in points_of(run, since=at) if point[1] <= before]
    if again:
        yield f"steps up to {before} were done again after they were saved"


class _Cluster:
    """A controller and two nodes, which end with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        ports = [free_port() for _ in range(3)]
        config = _CONFIG.format(
            host=socket.gethostname().partition(".")[0], ports=ports, folder=folder,
            user=getpass.getuser(),
        )  # fmt: skip
        (folder / "slurm.conf").write_text(config)
        (folder / "state").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> _Cluster:
        self.controller = self._start("slurmctld", "-D")
        for name in ("n1", "n2"):
            self.start_node(name)
        _wait(lambda: "idle" in self._told("sinfo", "--noheader", "--format=%T"), "two idle nodes")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.nodes:
            self.kill_node(name)
        self.controller.kill()
        self.controller.wait()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self.nodes[name] = self._start("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and everything that it has started."""
        # Slurm's own first, or it would tell the controller how the tasks ended.
        log = str(self.folder / f"slurmd-{name}.log")
        _kill([self.nodes[name].pid, *_step_daemons(log), *self.tasks_of(name)])
        self.nodes[name].wait()

    def tasks_of(self, name: str) -> Iterator[int]:
        """What runs on a node for jobs."""
        ours = f"{MARK}={os.environ[MARK]}".encode()
        return processes_with(f"SLURMD_NODENAME={name}".encode(), ours)

    def submit(self, run: Path, more: Sequence[str] = ()) -> str:
        """Submit the batch file for ranks of this Python; the job's number."""
        self.environment |= {
            "TORCHRUN": f"{sys.executable} -m torch.distributed.run",
            "RANKS_PER_NODE": "1", "PORT": str(free_port()), "RUN_DIR": str(run),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }  # fmt: skip
        said = f"--output={run}.said"
        words = [*_JOB.words, "--timeout-s", str(_TIMEOUT_S), *more]
        return self._told("sbatch", "--parsable", said, str(_BATCH), *words).strip()

    def limit(self, job: str, minutes: str) -> None:
        """Give a job another time limit."""
        self._told("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def cancel(self, job: str) -> None:
        """Cancel a job as its user does."""
        self._told("scancel", job)

    def wait_for_the_end(self, job: str, *, at_once: bool = True) -> None:
        """Wait for it; a requeued job need not wait for two minutes, as it does by default.

        After a node's loss it has to: Slurm may yet end there what it thinks is the start before.
        Seconds it waits always: nodes refuse what starts in the second in which it was ended.
        """
        pending_since = None

        def has_ended() -> bool:
            nonlocal pending_since
            if at_once and self.state_of(job) == "PENDING":
                pending_since = pending_since or time.monotonic()
                if time.monotonic() - pending_since > _PENDING_S:
                    self._told("scontrol", "update", f"JobId={job}", "StartTime=now")
            return self.state_of(job) not in ("PENDING", "RUNNING", "COMPLETING")

        _wait(has_ended, "the job's end")

    def state_of(self, job: str) -> str:
        """Slurm's word for what the job does."""
        return self._field(job, "JobState")

    def restarts_of(self, job: str) -> int:
        """How often it was requeued."""
        return int(self._field(job, "Restarts"))

    def _field(self, job: str, name: str) -> str:
        fields = self._told("scontrol", "show", "job", job).split()
        return next(f.partition("=")[2] for f in fields if f.startswith(f"{name}="))

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=self.environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _told(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout


def _step_daemons(log: str) -> Iterator[int]:
    """Those of a node, which have its log open; Slurm clears their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "comm").read_text().startswith("slurmstepd") and any(
                os.readlink(file) == log for file in (path / "fd").iterdir()
            ):
                yield int(path.name)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has(pid: int, file: str, wanted: bytes) -> bool:
    with contextlib.suppress(OSError):
        return wanted in (Path(f"/proc/{pid}") / file).read_bytes()
    return False


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.time() + _LONGEST_S
    while not condition():
        if time.time() > deadline:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(_LOOK_EVERY_S)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
