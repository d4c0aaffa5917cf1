"""The batch file under a Slurm of two nodes on this machine, one of which is killed.

``hatch run dev:python -m faults.slurm``: ``sbatch --requeue`` has to go on from the last
checkpoint and end like an undisturbed run. Exit codes: 0, 1 where it does not, 77 without Slurm.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.deck import Variant
from faults.machine import MARK, end_all_with_this_process, processes_with
from faults.verdict import differences, newest_good, points_of
from rank_testing.ports import free_port

_BATCH = Path(__file__).parents[1] / "pretrain" / "cluster" / "slurm.sbatch"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "srun")
_EXIT_SKIPPED = 77
_TIMEOUT_S = 30.0
_JOB = Variant(
    "slurm",
    "--dp 2 --no-tensorboard --train-iters 160 --save-interval 10 --eval-interval 50 "
    "--log-interval 50",
)
_KILLED_AFTER = 20
_LOOK_EVERY_S = 0.1
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
    """Run the batch file once, with a node killed in the middle."""
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
        wrong = list(_wrong_in(cluster))
    for problem in wrong:
        print(f"PROBLEM: {problem}; see {folder}")
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _wrong_in(cluster: _Cluster) -> Iterator[str]:
    """Run the job once as it is and once with a node killed; what is wrong then."""
    reference, run = cluster.folder / "undisturbed", cluster.folder / "run"
    job = cluster.submit(reference)
    cluster.wait_for_the_end(job)
    _say(f"undisturbed, the job is {cluster.state_of(job)}")
    job = cluster.submit(run)
    _wait(lambda: newest_good(run) >= _KILLED_AFTER, "first checkpoints")
    before, killed_at = newest_good(run), time.time()
    cluster.kill_node("n2")
    _say(f"node n2 was killed after step {before}")
    _wait(lambda: cluster.state_of(job) != "RUNNING", "Slurm to notice that a node is gone")
    cluster.start_node("n2")
    _say(f"node n2 is back, the job is {cluster.state_of(job)}")

    cluster.wait_for_the_end(job)
    _say(f"the job is {cluster.state_of(job)} after {time.time() - killed_at:.0f} s")
    if cluster.restarts_of(job) != 1:
        yield f"the job was requeued {cluster.restarts_of(job)} times, not once"
    yield from differences(run, reference, None)
    again = [point for point, _ in points_of(run, since=killed_at) if point[1] <= before]
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
        ours = f"{MARK}={os.environ[MARK]}".encode()
        tasks = processes_with(f"SLURMD_NODENAME={name}".encode(), ours)
        # Slurm's own first, or it would tell the controller how the tasks ended.
        log = str(self.folder / f"slurmd-{name}.log")
        for pid in [self.nodes[name].pid, *_step_daemons(log), *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[name].wait()

    def submit(self, run: Path) -> str:
        """Submit the batch file for ranks of this Python; the job's number."""
        self.environment |= {
            "TORCHRUN": f"{sys.executable} -m torch.distributed.run",
            "RANKS_PER_NODE": "1", "PORT": str(free_port()), "RUN_DIR": str(run),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }  # fmt: skip
        said = f"--output={run}.said"
        words = [*_JOB.words, "--timeout-s", str(_TIMEOUT_S)]
        return self._told("sbatch", "--parsable", said, str(_BATCH), *words).strip()

    def wait_for_the_end(self, job: str) -> None:
        """Wait for it; a requeued job need not wait for two minutes, as it does by default."""

        def has_ended() -> bool:
            if self.state_of(job) == "PENDING":
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
