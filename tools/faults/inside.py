"""The main job with a fault in it: functions are wrapped from outside, then its main is called.

``FAULTS_FOLDER`` holds ``plan.json``, a list of faults for each start; what happens is noted in
``events.jsonl``. Where torchrun starts ranks again, the faults until then say which start it is.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.deck import HARMLESS, RANKS, phase_of

FOLDER, START, COUNT = "FAULTS_FOLDER", "FAULTS_START", "FAULTS_COUNT"
BALLAST = Path("room", "ballast")  # beside the run
SLOW_S = 2.0
_FULL_FOR_STEPS = 12  # more than a sink may fail in a row
Function = Callable[..., Any]


def main(arguments: list[str]) -> int:
    """Be the launcher or a rank of the main job, with the faults that are planned for it."""
    if "RANK" in os.environ:
        _prepare(_Notes(Path(os.environ[FOLDER])))
    else:
        _wrap("pretrain.cli.launch:elastic_launch", _launching_this)
    from pretrain.cli.command import main as be_the_job

    return be_the_job(arguments)


def events_in(folder: Path) -> list[dict[str, Any]]:
    """What has been noted."""
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Notes:
    """The plan of this start, and the file of events that all processes append to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.start = int(os.environ.get(START, "0"))
        if os.environ.get(COUNT):
            self.start += sum(
                event["event"] == "fault" and event["kind"] not in HARMLESS
                and event["start"] >= self.start for event in events_in(folder)
            )  # fmt: skip
        plan = json.loads((folder / "plan.json").read_text())
        self.faults = [
            fault
            for fault in (plan[self.start] if self.start < len(plan) else [])
            if fault["rank"] == self.rank
        ]

    def note(self, event: str, **facts: Any) -> None:
        """Append one line, which a kill right after does not lose."""
        line = {
            "event": event, "start": self.start, "rank": self.rank, "pid": os.getpid(),
            "at": time.time(), **facts,
        }  # fmt: skip
        file = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)


def _prepare(notes: _Notes) -> None:
    # Threads depend on it, and sums on threads; all nodes are this machine.
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    notes.note("start")
    for fault in notes.faults:
        phase = phase_of(fault["phase"])
        wrapped = functools.partial(_with_fault, phase.how, _once(notes, fault))
        for place in phase.places:
            _wrap(place, wrapped)
    _wrap("pretrain.rank:join", lambda f: _noting_the_first(f, notes, "join"))
    _wrap("pretrain.run.saving:Saver.save", lambda f: _noting_sync_saves(f, notes))
    _wrap("pretrain.run.saving:Saver.wait", lambda f: _noting_async_saves(f, notes))
    _wrap("pretrain.run.checkpoints:CheckpointedState.load", lambda f: _noting_loads(f, notes))
    _wrap("pretrain.run.loop:training_log", lambda f: _noting_the_first(f, notes, "step"))


def _wrap(place: str, wrapped: Callable[[Function], Function]) -> None:
    """Replace a function by what is made of it."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrapped(getattr(owner, name)))


def _with_fault(how: str, happen: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if how == "before":
            happen()
        result = function(*args, **kwargs)
        if how == "after":
            happen()
        if how == "gradient" and result.requires_grad:
            result.register_hook(lambda gradient: happen())
        return result

    return call


def _once(notes: _Notes, fault: dict[str, Any]) -> Callable[[], None]:
    """What makes the fault happen at its n-th call."""
    calls = 0

    def happen() -> None:
        nonlocal calls
        calls += 1
        if calls == fault["hit"]:
            notes.note("fault", kind=fault["kind"], phase=fault["phase"])
            _DEEDS[fault["kind"]](notes.folder)

    return happen


def _raise_an_error(folder: Path) -> None:
    raise RuntimeError("a fault of the campaign")


def _run_out_of_memory(folder: Path) -> None:
    raise MemoryError("a fault of the campaign")


def _fill_the_disk(folder: Path) -> None:
    """Leave no byte on the file system of the run."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def _fill_the_disk_for_a_moment(folder: Path) -> None:
    _fill_the_disk(folder)
    steps = 0

    def count(function: Function, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == _FULL_FOR_STEPS:
            (folder / BALLAST).unlink()
        return function(*args, **kwargs)

    _wrap("pretrain.run.loop:training_log", lambda f: functools.partial(count, f))


def _kill_the_tracker(folder: Path) -> None:
    os.killpg(int((folder / "tracker.pid").read_text()), signal.SIGKILL)


def _kill_the_node(folder: Path) -> None:
    """Kill the agent and its only rank."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


_DEEDS: dict[str, Callable[[Path], object]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "stop and continue": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": _raise_an_error,
    "exit": lambda _: os._exit(7),
    "abort": lambda _: os.abort(),
    "memory": _run_out_of_memory,
    "slow": lambda _: time.sleep(SLOW_S),
    "launcher": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "node": _kill_the_node,
    "full disk": _fill_the_disk,
    "full disk for a moment": _fill_the_disk_for_a_moment,
    "tracker away": _kill_the_tracker,
    "tracker restarted": _kill_the_tracker,
    # The damage is done once the job has ended.
    "flipped bit": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "truncated file": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "no manifest": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}


def _noting_sync_saves(function: Function, notes: _Notes) -> Function:
    @functools.wraps(function)
    def save(self: Any, step: int) -> None:
        function(self, step)
        if self._pending is None:
            notes.note("saved", step=step)

    return save


def _noting_async_saves(function: Function, notes: _Notes) -> Function:
    @functools.wraps(function)
    def wait(self: Any) -> None:
        pending = self._pending
        function(self)
        if pending is not None:
            notes.note("saved", step=int(pending.path.name.removeprefix("step_")))

    return wait


def _noting_loads(function: Function, notes: _Notes) -> Function:
    @functools.wraps(function)
    def load(self: Any, path: Path) -> None:
        function(self, path)
        notes.note("loaded", step=int(path.name.removeprefix("step_")))

    return load


def _noting_the_first(function: Function, notes: _Notes, event: str) -> Function:
    seen: list[bool] = []

    @functools.wraps(function)
    def log(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            notes.note(event)
            seen.append(True)
        return function(*args, **kwargs)

    return log


def _launching_this(elastic_launch: Function) -> Function:
    """Have the job's own launcher start ranks that are this program too."""

    def launcher(config: Any, program: str) -> Function:
        ranks = elastic_launch(config, program)
        return lambda option, _, *words: ranks(option, "faults.inside", *words)

    return launcher


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
