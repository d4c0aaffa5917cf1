"""Starts of a job: ranks forked as by torchrun, the real torchrun, and the job's own command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.deck import RANKS
from faults.inside import COUNT, FOLDER, START, events_in
from pretrain.cli import SLOW_IMPORTS
from rank_testing import preload
from rank_testing.scripts import Script

preload("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", *SLOW_IMPORTS)

MAX_RESTARTS = 3
# As long as torchrun waits between SIGTERM and SIGKILL.
KILLED_AFTER_S = 30.0
_STOPPED_KILLED_AFTER_S = 1.0
_LOOK_EVERY_S = 0.05
_CODE = "import sys\nfrom faults.inside import main\nsys.exit(main(sys.argv[1:]))"
_NOT_A_USERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI")


@dataclass
class Ended:
    """How the ranks of a start, or the command that started them, ended.

    Attributes:
        codes: exit codes, negative for signals.
        at: when each has ended, of ``time.time()``.
        said: what was printed.
        killed: ranks that had to be killed because they did not end by themselves.
        left: a stopped rank that was left as it was.
        gone: when each rank that a launcher had started was gone, by its process.
    """

    codes: dict[int, int] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)
    said: str = ""
    killed: set[int] = field(default_factory=set)
    left: dict[int, Script] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        """Whether all ended well."""
        return not self.left and not any(self.codes.values())

    def look_for_ranks(self, folder: Path) -> set[int]:
        """Note which are gone, of all that have noted their start; those that are not."""
        pids = {event["pid"] for event in events_in(folder) if event["event"] == "start"}
        left = {pid for pid in pids - set(self.gone) if _is_alive(pid)}
        self.gone |= dict.fromkeys(pids - set(self.gone) - left, time.time())
        return left

    def wait_for_ranks(self, folder: Path) -> None:
        """Wait for those that a launcher has left behind; kill what does not end by itself."""
        deadline = time.time() + KILLED_AFTER_S
        while left := self.look_for_ranks(folder):
            if time.time() > deadline:
                self.killed |= left
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S)


def environment(folder: Path, start: int, more: Mapping[str, str]) -> dict[str, str]:
    """The variables of a user whose job has this start's faults."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_A_USERS}
    tools = str(Path(__file__).parents[1])
    return {**kept, "PYTHONPATH": tools, FOLDER: str(folder), START: str(start), **more}


class Forked:
    """Ranks forked with torch loaded, which meet at a store that outlives them as torchrun's do."""

    def __init__(self) -> None:
        self._store: object = None
        self._port = 0

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        start: int,
        stopped: Callable[[], set[int]],
        *,
        leave_stopped: bool,
        limit_s: float,
    ) -> Ended:
        """Start all ranks, and end them as torchrun's agent does once one has failed."""
        restart = start % (MAX_RESTARTS + 1)
        if not restart:
            self._make_store()
        launcher = {
            "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS), "TORCHELASTIC_RUN_ID": "faults",
        }  # fmt: skip
        ranks = {}
        for rank in range(RANKS):
            own = {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A node whose ranks are started again because of another one does not count that.
            own["TORCHELASTIC_RESTART_COUNT"] = str(0 if rank else restart)
            ranks[rank] = Script(_CODE, *words, cwd=folder, env=environment(folder, start, own))
        return _watched(ranks, stopped, leave_stopped=leave_stopped, limit_s=limit_s)

    def _make_store(self) -> None:
        import torch.distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        self._store, self._port = store, store.port


def _watched(
    ranks: dict[int, Script],
    stopped: Callable[[], set[int]],
    *,
    leave_stopped: bool,
    limit_s: float,
) -> Ended:
    ended = Ended()
    began, failed_at = time.time(), 0.0
    while running := {rank: one for rank, one in ranks.items() if rank not in ended.at}:
        now = time.time()
        for rank, script in running.items():
            if script.is_running:
                continue
            done = script.wait()
            ended.at[rank], ended.codes[rank] = now, done.returncode
            ended.said += f"--- rank {rank}, {done.returncode}\n{done.stdout}{done.stderr}"
        if not failed_at and any(ended.codes.values()):
            failed_at = now
            for script in running.values():
                script.send(signal.SIGTERM)
        frozen = stopped() & set(running)
        if failed_at and frozen == set(running) - set(ended.at):
            if leave_stopped:
                ended.left = {rank: ranks[rank] for rank in frozen}
                return ended
            if now - failed_at > _STOPPED_KILLED_AFTER_S:
                _kill(running, frozen)
        if (failed_at and now - failed_at > KILLED_AFTER_S) or now - began > limit_s:
            is_late = now - began > limit_s
            ended.killed |= set(running) - set(ended.at) - (set() if is_late else frozen)
            _kill(running, set(running))
        time.sleep(_LOOK_EVERY_S)
    return ended


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(ranks: dict[int, Script], which: set[int]) -> None:
    for rank in which:
        ranks[rank].send(signal.SIGKILL)


def torchrun(words: Sequence[str], folder: Path, start: int, limit_s: float) -> Ended:
    """Run the job under the real torchrun, which starts it again up to three times."""
    command = [
        "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        "--max-restarts", str(MAX_RESTARTS), "-m", "faults.inside", *words,
    ]  # fmt: skip
    return _command(command, folder, start, limit_s, {COUNT: "1"})


def own_command(words: Sequence[str], folder: Path, start: int, limit_s: float) -> Ended:
    """Run what ``hatch run pretrain`` runs, which has a launcher of its own."""
    return _command(["-m", "faults.inside", *words], folder, start, limit_s, {})


def _command(
    command: list[str], folder: Path, start: int, limit_s: float, more: Mapping[str, str]
) -> Ended:
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment(folder, start, more),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended, deadline = Ended(), time.time() + limit_s
        while (code := process.poll()) is None and time.time() < deadline:
            ended.look_for_ranks(folder)
            time.sleep(_LOOK_EVERY_S)
        if code is None:
            ended.killed.add(0)
        ended.codes[0] = end(process) if code is None else code
        ended.at[0] = time.time()
        ended.wait_for_ranks(folder)
        said.seek(0)
        ended.said = said.read()
    return ended


def end(process: subprocess.Popen[bytes]) -> int:
    """Ask a launcher to end, which ends its ranks; its exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(2 * KILLED_AFTER_S)
