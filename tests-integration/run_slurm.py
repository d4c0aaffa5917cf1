"""The batch file under a Slurm of two nodes on this machine, with each fault that it handles.

``hatch run slurm [node|launcher|limit|diverged|refused|cancelled ...]``: a
requeued job must resume from the last checkpoint and end like an undisturbed run. A job that cannot
succeed must not be requeued. Exit codes: 0, 1 for a problem, 77 without Slurm.
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

_TOOLS = Path(__file__).parents[1] / "tools"
_BATCH = _TOOLS / "pretrain" / "cluster" / "slurm.sbatch"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")
_EXIT_SKIPPED = 77  # as in automake and Meson
_TIMEOUT_S = 30.0
_JOB = Variant(
    "slurm",
    "--dp 2 --no-tensorboard --train-iters 160 --save-interval 10 --eval-interval 50 "
    "--log-interval 50",
)
_KILLED_AFTER = 20
_LOOK_EVERY_S = 0.1
_PENDING_S = 3.0
_LIMIT_S = 900.0
_CONFIG = Path(__file__).with_name("slurm.conf")


def main() -> int:
    """Run the batch file undisturbed, then each requested case."""
    parser = argparse.ArgumentParser(prog="hatch run slurm")
    parser.add_argument("case", nargs="*", choices=[[], *_CASES], metavar="CASE")
    requested = parser.parse_args().case or list(_CASES)
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        print(f"skipped: {', '.join(missing)} not found (Debian, Ubuntu: apt install slurm-wlm)")
        return _EXIT_SKIPPED
    os.environ["PATH"] = path
    end_all_with_this_process()
    for number in (signal.SIGINT, signal.SIGTERM):  # step daemons would survive _exit
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="faults-slurm-"))
    problems = []
    with _Cluster(folder) as cluster:
        reference = folder / "undisturbed"
        job = cluster.submit(reference)
        cluster.wait_for_end(job)
        _print(f"undisturbed, the job is {cluster.state_of(job)}")
        for case in requested:
            problems += [
                f"{case}: {text}" for text in _CASES[case](cluster, reference, folder / case)
            ]
    for problem in problems:
        print(f"PROBLEM: {problem}. See {folder}")
    if not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


def _lose_node(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A node is killed: Slurm requeues the job."""
    job, before = _start_job(cluster, run)
    killed_at = time.time()
    cluster.kill_node("n2")
    _print(f"node n2 was killed after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "Slurm to detect the lost node")
    cluster.start_node("n2")
    _print(f"node n2 is back, the job is {cluster.state_of(job)}")
    yield from _check_end(cluster, job, reference, run, before, killed_at, at_once=False)


def _kill_launcher(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A rank is killed and restarted by torchrun, then a launcher is killed: the file requeues."""
    job, before = _start_job(cluster, run)
    _kill([pid for pid in cluster.tasks_of("n2") if _has(pid, "environ", b"\0RANK=")])
    _print(f"the rank of node n2 was killed after step {before}")
    _wait(lambda: newest_good(run) >= before + _KILLED_AFTER, "later checkpoints")
    if cluster.restarts_of(job):
        yield "the job was requeued for a rank that torchrun can restart"
    before, killed_at = newest_good(run), time.time()
    _kill([pid for pid in cluster.tasks_of("n2") if _has(pid, "cmdline", b"distributed.run")])
    _print(f"the launcher of node n2 was killed after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "the job's end after its launcher's")
    yield from _check_end(cluster, job, reference, run, before, killed_at)


def _reach_time_limit(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """The time limit is near: the job saves, ends and is requeued."""
    # Slurm checks limits twice a minute. A fast machine would finish before, so a rank is slow.
    job, before = _start_job(cluster, run, "--slow-rank", "1:60")
    cluster.limit(job, "1")
    _print(f"the time limit was lowered after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "the job's end before its time limit")
    ended_at, before = time.time(), newest_good(run)
    _print(f"the job is {cluster.state_of(job)}, saved at step {before}")
    if before % 10 == 0:
        yield f"the newest checkpoint is the regular one of step {before}"
    _wait(lambda: cluster.state_of(job) != "COMPLETING", "the job to be pending")
    cluster.limit(job, "60")
    yield from _check_end(cluster, job, reference, run, before, ended_at)


def _diverge(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A run that diverges after a checkpoint is not requeued."""
    options = "--lr 1e30 --min-lr 1 --warmup-iters 0 --save-interval 1 --max-skipped 3"
    yield from _check_failure(cluster, run, options, 1, "not finite")


def _refuse(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A run that cannot resume with its options is not requeued."""
    shutil.copytree(reference, run)
    options, last = "--tp 3 --train-iters 320", newest_good(reference)
    yield from _check_failure(cluster, run, options, last, "pretrain: error: ")


def _check_failure(
    cluster: _Cluster, run: Path, options: str, last: int, message: str
) -> Iterator[str]:
    job = cluster.submit(run, options.split())
    cluster.wait_for_end(job)
    _print(f"with {options}, the job is {cluster.state_of(job)}")
    yield from _check_state(cluster, job, "FAILED")
    if message not in Path(f"{run}.output").read_text():
        yield f"the output does not contain {message!r}"
    if newest_good(run) != last:
        yield f"the newest checkpoint is that of step {newest_good(run)}"


def _cancel(cluster: _Cluster, reference: Path, run: Path) -> Iterator[str]:
    """A cancelled run has saved, and is not requeued."""
    job, before = _start_job(cluster, run)
    cluster.cancel(job)
    cluster.wait_for_end(job)
    _print(f"cancelled after step {before}, saved at step {newest_good(run)}")
    yield from _check_state(cluster, job, "CANCELLED")


_CASES = {
    "node": _lose_node, "launcher": _kill_launcher, "limit": _reach_time_limit,
    "diverged": _diverge, "refused": _refuse, "cancelled": _cancel,
}  # fmt: skip


def _check_state(cluster: _Cluster, job: str, expected: str) -> Iterator[str]:
    if (state := cluster.state_of(job)) != expected:
        yield f"the job is {state}, not {expected}"
    if cluster.restarts_of(job):
        yield f"the job was requeued {cluster.restarts_of(job)} times"


def _start_job(cluster: _Cluster, run: Path, *more: str) -> tuple[str, int]:
    """A job in the middle of its steps, and the step of its newest checkpoint."""
    job = cluster.submit(run, more)
    _wait(lambda: newest_good(run) >= _KILLED_AFTER, "first checkpoints")
    return job, newest_good(run)


def _check_end(
    cluster: _Cluster,
    job: str,
    reference: Path,
    run: Path,
    before: int,
    at: float,
    *,
    at_once: bool = True,
) -> Iterator[str]:
    """Wait for a job with a fault after a checkpoint, and compare its result."""
    cluster.wait_for_end(job, at_once=at_once)
    _print(f"the job is {cluster.state_of(job)} after {time.time() - at:.0f} s")
    if cluster.restarts_of(job) != 1:
        yield f"the job was requeued {cluster.restarts_of(job)} times, not once"
    yield from differences(run, reference, None)
    if any(step <= before for (_, step), _ in points_of(run, since=at)):
        yield f"steps up to {before} were repeated although they were saved"


class _Cluster:
    """A controller and two nodes, until the end of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        ports = [free_port() for _ in range(3)]
        config = _CONFIG.read_text().format(
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
        _wait(lambda: "idle" in self._call("sinfo", "--noheader", "--format=%T"), "two idle nodes")
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
        """Kill a node's daemon and all its processes."""
        # Slurm's daemons first, or they would report the end of the tasks to the controller.
        log = str(self.folder / f"slurmd-{name}.log")
        _kill([self.nodes[name].pid, *_step_daemons(log), *self.tasks_of(name)])
        self.nodes[name].wait()

    def tasks_of(self, name: str) -> Iterator[int]:
        """The processes of jobs on a node."""
        ours = f"{MARK}={os.environ[MARK]}".encode()
        return processes_with(f"SLURMD_NODENAME={name}".encode(), ours)

    def submit(self, run: Path, more: Sequence[str] = ()) -> str:
        """Submit the batch file for ranks of this Python. Returns the job's number."""
        self.environment |= {
            "TORCHRUN": f"{sys.executable} -m torch.distributed.run",
            "RANKS_PER_NODE": "1", "PORT": str(free_port()), "RUN_DIR": str(run),
            "PYTHONPATH": str(_TOOLS),
        }  # fmt: skip
        output = f"--output={run}.output"
        words = [*_JOB.words, "--timeout-s", str(_TIMEOUT_S), *more]
        return self._call("sbatch", "--parsable", output, str(_BATCH), *words).strip()

    def limit(self, job: str, minutes: str) -> None:
        """Give a job another time limit."""
        self._call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def cancel(self, job: str) -> None:
        """Cancel a job as its user does."""
        self._call("scancel", job)

    def wait_for_end(self, job: str, *, at_once: bool = True) -> None:
        """Wait for the end of a job. ``at_once`` skips Slurm's wait of 2 minutes before a restart.

        After the loss of a node it must wait: Slurm may still kill processes of the previous start
        there. It always waits a few seconds: nodes refuse a job in the second of its end.
        """
        pending_since = None

        def has_ended() -> bool:
            nonlocal pending_since
            if at_once and self.state_of(job) == "PENDING":
                pending_since = pending_since or time.monotonic()
                if time.monotonic() - pending_since > _PENDING_S:
                    self._call("scontrol", "update", f"JobId={job}", "StartTime=now")
            return self.state_of(job) not in ("PENDING", "RUNNING", "COMPLETING")

        _wait(has_ended, "the job's end")

    def state_of(self, job: str) -> str:
        """The state of a job as Slurm reports it."""
        return self._read_field(job, "JobState")

    def restarts_of(self, job: str) -> int:
        """How often a job was requeued."""
        return int(self._read_field(job, "Restarts"))

    def _read_field(self, job: str, name: str) -> str:
        fields = self._call("scontrol", "show", "job", job).split()
        return next(f.partition("=")[2] for f in fields if f.startswith(f"{name}="))

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=self.environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _call(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout


def _step_daemons(log: str) -> Iterator[int]:
    """The step daemons of a node. They have its log open. Slurm clears their environment."""
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


def _wait(condition: Callable[[], bool], event: str) -> None:
    deadline = time.time() + _LIMIT_S
    while not condition():
        if time.time() > deadline:
            raise TimeoutError(f"timeout while waiting for {event}")
        time.sleep(_LOOK_EVERY_S)


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
