"""The main job with a fault in it: functions are wrapped from outside, then its main is called.

``FAULTS_FOLDER`` has ``plan.json``, a list of faults for each start, and ``events.jsonl``, where
ranks record events. If torchrun restarts ranks, the number of earlier faults identifies the start.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from faults.deck import DAMAGES, FORWARD, HARMLESS, RANKS, SIGNALS, STEPS, phase_of

FOLDER, START, COUNT = "FAULTS_FOLDER", "FAULTS_START", "FAULTS_COUNT"
UNDER_HATCH = "FAULTS_UNDER_HATCH"
BALLAST = Path("room", "ballast")  # on the file system of the run
SLOW_S = 2.0
_FULL_FOR_STEPS = 12  # more than a sink may fail in a row
Function = Callable[..., Any]


def main(arguments: list[str]) -> int:
    """Run the launcher or a rank of the main job, with the faults planned for it."""
    os.chdir(os.environ[FOLDER])  # hatch starts commands in the repository
    if "RANK" in os.environ:
        _prepare(_Events(Path(os.environ[FOLDER])))
    else:
        if os.environ.pop(UNDER_HATCH, ""):
            os.environ["PRETRAIN_STARTER"] = str(os.getppid())  # as hatch.toml does
        _wrap("pretrain.cli.launch:elastic_launch", _launch_this)
    from pretrain.cli.command import main as run_job

    return run_job(arguments)


def events_in(folder: Path) -> list[dict[str, Any]]:
    """All recorded events."""
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Events:
    """The plan of this start, and the file of events of all processes."""

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

    def record(self, event: str, **facts: Any) -> None:
        """Append one line, which survives a kill immediately afterwards."""
        line = {
            "event": event, "start": self.start, "rank": self.rank,
            "pid": int(os.readlink("/proc/self")),  # as seen from outside of a container
            "at": time.time(), **facts,
        }  # fmt: skip
        file = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)


def _prepare(events: _Events) -> None:
    # The number of threads depends on it, and sums depend on the threads. All nodes are this host.
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    events.record("start")
    for fault in events.faults:
        phase = phase_of(fault["phase"])
        wrap = partial(_add_fault, phase.how, _make_trigger(events, fault))
        for place in phase.places:
            _wrap(place, wrap)
    _wrap("pretrain.rank:join", lambda f: _record_first(f, events, "join"))
    _wrap("pretrain.run.saving:Saver.save", lambda f: _record_saves(f, events))
    _wrap("pretrain.run.saving:Saver.wait", lambda f: _record_saves(f, events))
    _wrap("pretrain.run.checkpoints:CheckpointedState.load", lambda f: _record_loads(f, events))
    _wrap("pretrain.run.loop:training_log", lambda f: _record_first(f, events, "step"))


def _wrap(place: str, wrap: Callable[[Function], Function]) -> None:
    """Replace a function with its wrapped version."""
    owner, name = find_function(place)
    setattr(owner, name, wrap(getattr(owner, name)))


def find_function(place: str) -> tuple[Any, str]:
    """The owner and the name of a function such as ``module:Class.function``."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _add_fault(how: str, happen: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if how == "before" or (how == "last step" and args[1] == STEPS):
            happen()
        result = function(*args, **kwargs)
        if how == "after":
            happen()
        if how == "gradient" and result.requires_grad:
            result.register_hook(lambda gradient: happen())
        return result

    return call


def _make_trigger(events: _Events, fault: dict[str, Any]) -> Callable[[], None]:
    """A function whose n-th call causes the fault."""
    calls = 0

    def happen() -> None:
        nonlocal calls
        calls += 1
        if calls == fault["hit"]:
            events.record("fault", kind=fault["kind"], phase=fault["phase"])
            _ACTIONS[fault["kind"]](events.folder)

    return happen


def _raise(error: type[Exception], folder: Path) -> None:
    raise error("a fault of the campaign")


def send(names: str, level: int, folder: Path) -> None:
    """Send a signal to this process (level 0) or one above it, and SIGCONT after a second."""
    pid = (os.getpid, os.getppid, _find_starter)[level]()
    name, _, after = names.partition("+")
    if after:
        # The launcher may end the session of a rank meanwhile.
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -{after} {pid}"], start_new_session=True)
    os.kill(pid, signal.Signals[f"SIG{name}"])


def _find_starter() -> int:
    """The process that started the launcher."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def _spoil_loss(folder: Path) -> None:
    for place in FORWARD:
        _wrap(place, lambda f: lambda *args, **kwargs: f(*args, **kwargs) * math.nan)


def _fill_disk(folder: Path) -> None:
    """Use every byte of the file system of the run."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def _fill_disk_briefly(folder: Path) -> None:
    _fill_disk(folder)
    steps = 0

    def count(function: Function, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == _FULL_FOR_STEPS:
            (folder / BALLAST).unlink()
        return function(*args, **kwargs)

    _wrap("pretrain.run.loop:training_log", lambda f: partial(count, f))


def _kill_tracker(folder: Path) -> None:
    os.killpg(int((folder / "tracker.pid").read_text()), signal.SIGKILL)


def _kill_node(folder: Path) -> None:
    """Kill the agent and its only rank."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


_ACTIONS: dict[str, Callable[[Path], object]] = {
    "kill": partial(send, "KILL", 0),
    **dict.fromkeys(("stop", "stop and continue"), partial(send, "STOP", 0)),
    "exception": partial(_raise, RuntimeError),
    "exit": lambda _: os._exit(7),
    "abort": lambda _: os.abort(),
    "memory": partial(_raise, MemoryError),
    "slow": lambda _: time.sleep(SLOW_S),
    **{kind: partial(send, *facts) for kind, facts in SIGNALS.items()},
    "nan": _spoil_loss,
    "node": _kill_node,
    "full disk": _fill_disk,
    "full disk for a moment": _fill_disk_briefly,
    **dict.fromkeys(("tracker away", "tracker restarted"), _kill_tracker),
    # The rest is done after the end of the job.
    **dict.fromkeys((*DAMAGES, "changed"), partial(send, "KILL", 0)),
}


def _record_saves(function: Function, events: _Events) -> Function:
    """Record a save that ``Saver.save`` or ``Saver.wait`` has finished."""

    @functools.wraps(function)
    def finish(self: Any, *step: int) -> None:
        pending = self._pending
        function(self, *step)
        if not step and pending is not None:
            events.record("saved", step=int(pending.path.name.removeprefix("step_")))
        elif step and self._pending is None:
            events.record("saved", step=step[0])

    return finish


def _record_loads(function: Function, events: _Events) -> Function:
    @functools.wraps(function)
    def load(self: Any, path: Path) -> None:
        function(self, path)
        events.record("loaded", step=int(path.name.removeprefix("step_")))

    return load


def _record_first(function: Function, events: _Events, event: str) -> Function:
    record = functools.cache(events.record)  # only the first call has an effect

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        record(event)
        return function(*args, **kwargs)

    return call


def _launch_this(elastic_launch: Function) -> Function:
    """Have the job's launcher start ranks with this module."""

    def launcher(config: Any, program: str) -> Function:
        ranks = elastic_launch(config, program)
        return lambda option, _, *words: ranks(option, "faults.inside", *words)

    return launcher


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
