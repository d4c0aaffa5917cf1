"""Starts of a job in forked ranks, and the end of any start."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.deck import RANKS
from faults.inside import FOLDER, START, events_in
from pretrain.cli import SLOW_IMPORTS
from pretrain.cli.store import open_store
from rank_testing import preload
from rank_testing.scripts import Script

preload("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", *SLOW_IMPORTS)

MAX_RESTARTS = 3
# torchrun waits so long between SIGTERM and SIGKILL.
KILLED_AFTER_S = 30.0
_STOPPED_KILLED_AFTER_S = 1.0
LOOK_EVERY_S = 0.05
_CODE = "import sys\nfrom faults.inside import main\nsys.exit(main(sys.argv[1:]))"
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI")


@dataclass
class Ended:
    """The end of a start's ranks, or of the launchers that started them.

    Attributes:
        codes: exit codes, negative for signals.
        at: the end of each, of ``time.time()``.
        output: the printed text.
        killed: ranks or launchers that did not end until they were killed.
        left: a stopped rank that was left stopped.
        gone: the end of each rank of a launcher, by its process.
    """

    codes: dict[int, int] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)
    output: str = ""
    killed: set[int] = field(default_factory=set)
    left: dict[int, Script] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        """Whether all ended well."""
        return not self.left and not any(self.codes.values())

    def look_for_ranks(self, folder: Path) -> set[int]:
        """Record the launcher's ranks that have ended. Returns the processes of the others."""
        pids = {event["pid"] for event in events_in(folder) if event["event"] == "start"}
        left = {pid for pid in pids - set(self.gone) if _is_alive(pid)}
        self.gone |= dict.fromkeys(pids - set(self.gone) - left, time.time())
        return left

    def wait_for_ranks(self, folder: Path) -> None:
        """Wait for ranks that outlive their launcher, and kill them after a while."""
        deadline = time.time() + KILLED_AFTER_S
        while left := self.look_for_ranks(folder):
            if time.time() > deadline:
                self.killed |= left
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_EVERY_S)


def environment(folder: Path, start: int, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a user, plus this start's faults."""
    inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
    tools = str(Path(__file__).parents[1])
    return {**inherited, "PYTHONPATH": tools, FOLDER: str(folder), START: str(start), **more}


class Forked:
    """Ranks forked with torch loaded. As under torchrun, their store outlives them."""

    def __init__(self) -> None:
        self._store: Any = None

    def start(
        self, words: Sequence[str], folder: Path, start: int, stopped: Callable[[], set[int]], *,
        leave_stopped: bool, limit_s: float,
    ) -> Ended:  # fmt: skip
        """Start all ranks. Once one fails, end the others as torchrun's agent does."""
        restart = start % (MAX_RESTARTS + 1)
        if not restart:
            self._store = open_store("127.0.0.1")
        launcher = {
            "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS), "TORCHELASTIC_RUN_ID": "faults",
        }  # fmt: skip
        ranks = {}
        for rank in range(RANKS):
            variables = {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A node that restarts because of another node does not count that.
            variables["TORCHELASTIC_RESTART_COUNT"] = str(0 if rank else restart)
            ranks[rank] = Script(
                _CODE, *words, cwd=folder, env=environment(folder, start, variables)
            )
        return _watch(ranks, stopped, leave_stopped=leave_stopped, limit_s=limit_s)


def _watch(
    ranks: dict[int, Script], stopped: Callable[[], set[int]], *, leave_stopped: bool,
    limit_s: float,
) -> Ended:  # fmt: skip
    ended = Ended()
    began, failed_at = time.time(), 0.0
    while running := {rank: one for rank, one in ranks.items() if rank not in ended.at}:
        now = time.time()
        for rank, script in running.items():
            if script.is_running:
                continue
            done = script.wait()
            ended.at[rank], ended.codes[rank] = now, done.returncode
            ended.output += f"--- rank {rank}, {done.returncode}\n{done.stdout}{done.stderr}"
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
        time.sleep(LOOK_EVERY_S)
    return ended


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(ranks: dict[int, Script], which: set[int]) -> None:
    for rank in which:
        ranks[rank].send(signal.SIGKILL)
