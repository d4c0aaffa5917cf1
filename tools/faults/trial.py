"""One run with several faults until its end, and the checks on the way."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from faults import launchers, starting
from faults.deck import CHANGES, DAMAGES, Fault, Variant
from faults.inside import BALLAST, events_in
from faults.tracker import Tracker
from faults.verdict import differences, is_good, newest_good, step_of
from mcore.parallel.checkpoint.files.index import read_index
from rank_testing.scripts import Script

BEYOND_TIMEOUT_S = 10.0
RUN = Path("room", "run")
_CONTINUED_AFTER_S = 1.0
# Starts that fail without a fault of ours, on a busy machine.
_MOST_UNPLANNED = 2
# Only a hang is this slow: on a starved machine, imports alone take minutes.
_LIMIT_S = 900.0


@dataclass
class Happened:
    """A fault that has happened.

    Attributes:
        ended_s: seconds until all ranks that were not stopped had ended. None if the job continued.
        late_s: the part of ``ended_s`` without a core for the campaign's clock.
        recovered_s: seconds until this start or the next did a step or finished.
    """

    fault: Fault
    launcher: str
    variant: str
    at: float
    start: int
    ended_s: float | None = None
    late_s: float = 0.0
    recovered_s: float | None = None


@dataclass
class Outcome:
    """The outcome of a trial: faults that happened, faults that did not, and problems."""

    happened: list[Happened] = field(default_factory=list)
    unused: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: int = 0


@dataclass(frozen=True)
class Place:
    """The folder of a trial, and the things that trials share.

    Attributes:
        folder: the new folder of this trial.
        reference: the undisturbed run of the variant.
        timeout_s: the timeout of collectives.
        disk: the small file system for the run, if any.
        beyond_timeout_s: the time that ranks have to end, in addition to the timeout.
        late_s: the seconds that the machine lost between two times.
    """

    folder: Path
    reference: Path
    timeout_s: float
    tracker: Tracker | None = None
    disk: Path | None = None
    beyond_timeout_s: float = BEYOND_TIMEOUT_S
    late_s: Callable[[float, float], float] = lambda begin, end: 0.0

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / RUN


class Trial:
    """A run under a launcher, with faults in their order."""

    def __init__(
        self, place: Place, variant: Variant, faults: Sequence[Fault], launcher: str, seed: int
    ) -> None:
        self.place = place
        self.variant = variant
        self.launcher = launcher
        options = f"--run-dir {RUN} --auto-resume --timeout-s {place.timeout_s} --seed {seed}"
        self.words = [*variant.words, *options.split()]
        if variant.mlflow and place.tracker is not None:
            self.words += ["--mlflow-uri", place.tracker.uri]
        self.faults = list(faults)
        self.plan = _assign_starts(self.faults)
        self.damaged: set[int] = set()
        self.only_kills: list[tuple[str, str]] = []
        self.outcome = Outcome()
        self.forked = starting.Forked()
        self.left: list[threading.Thread] = []

    def run(self) -> Outcome:
        """Start the job until it has finished, and compare its files."""
        self._make_room()
        facts = [[dataclasses.asdict(fault) for fault in faults] for faults in self.plan]
        (self.place.folder / "plan.json").write_text(json.dumps(facts))
        unplanned = 0
        while True:
            number = self.outcome.starts
            ended = self._start(number)
            self._settle(number, ended)
            if ended.is_success or self.outcome.problems:
                break
            if not self._list_faults(number):
                unplanned += 1
                if unplanned > _MOST_UNPLANNED:
                    self._add_problem(
                        f"start {number} ended without a fault: {ended.output[-1500:]}"
                    )
                    break
        for thread in self.left:
            thread.join()
        self._finish(ended)
        return self.outcome

    def _make_room(self) -> None:
        room = self.place.folder / RUN.parent
        self.place.folder.mkdir(parents=True)
        if self.place.disk is None:
            room.mkdir()
            (room / "text").write_text("".join(f"line {number}\n" for number in range(2000)))
        else:
            shutil.rmtree(self.place.disk / RUN.name, ignore_errors=True)
            room.symlink_to(self.place.disk, target_is_directory=True)

    def _start(self, number: int) -> starting.Ended:
        self._prepare_tracker(number)
        folder = self.place.folder
        if self.launcher == "torchrun":
            return launchers.torchrun(self.words, folder, number, 4 * _LIMIT_S)
        if self.launcher == "agents":
            return launchers.agents(self.words, folder, number, 4 * _LIMIT_S)
        if self.launcher != "forked":
            return launchers.own_command(self.words, folder, number, _LIMIT_S, self.launcher)
        kinds = {fault.kind for fault in self._list_planned(number)}
        return self.forked.start(
            self.words, folder, number,
            lambda: {e["rank"] for e in self._list_faults(number) if "stop" in e["kind"]},
            leave_stopped="stop and continue" in kinds, limit_s=_LIMIT_S,
        )  # fmt: skip

    def _settle(self, number: int, ended: starting.Ended) -> None:
        """Record the faults of one start, check its end, and do the damage between two starts."""
        (self.place.folder / f"output-{number}").write_text(ended.output)
        faults = self._list_faults(number)
        self.outcome.starts = 1 + max([number, *(e["start"] for e in self._read_events())])
        for event in faults:
            fault = self._find_fault(event)
            one = Happened(fault, self.launcher, self.variant.name, event["at"], event["start"])
            self.outcome.happened.append(one)
            self._check_end(one, ended)
        if ended.killed:
            self._add_problem(
                f"start {number} hung: {[str(o.fault) for o in self.outcome.happened]}"
            )
        (self.place.folder / BALLAST).unlink(missing_ok=True)
        for rank, script in ended.left.items():
            self.left.append(self._continue(rank, script))
        for one in self.outcome.happened[-len(faults) :] if faults else ():
            if one.fault.kind == "changed":
                self.words += CHANGES.split()
            if one.fault.kind in DAMAGES and not self._damage(one.fault.kind):
                self.only_kills.append((one.fault.kind, one.fault.phase))
                # There was no checkpoint to damage, so the fault was only a kill.
                one.fault = dataclasses.replace(one.fault, kind="kill")
        self._check_checkpoints()

    def _check_end(self, one: Happened, ended: starting.Ended) -> None:
        """Measure the time until its ranks had ended, except a stopped rank."""
        if not one.fault.is_fatal:
            return
        stops = one.fault.kind.startswith("stop")
        joins = [e["at"] for e in self._read_events("join") if e["start"] == one.start]
        began = max([one.at, *joins])  # a rank notices nothing before it joins
        if self.launcher == "forked":
            others = [at for rank, at in ended.at.items() if not (stops and rank == one.fault.rank)]
        else:
            ranks = [e for e in self._read_events("start") if e["start"] == one.start]
            others = [
                ended.gone[e["pid"]] for e in ranks if not (stops and e["rank"] == one.fault.rank)
            ]
        end = max(others)
        one.ended_s = max(0.0, end - began)
        one.late_s = self.place.late_s(began, end)
        if one.ended_s - one.late_s > self.place.timeout_s + self.place.beyond_timeout_s:
            late = f", {one.late_s:.1f} s of them without a core" if one.late_s else ""
            self._add_problem(f"{one.fault}: ranks continued for {one.ended_s:.1f} s{late}")

    def _continue(self, rank: int, script: Script) -> threading.Thread:
        """Continue a stopped rank during the next start. It must end."""

        def work() -> None:
            time.sleep(_CONTINUED_AFTER_S)
            script.send(signal.SIGCONT)
            try:
                script.wait(self.place.timeout_s + self.place.beyond_timeout_s)
            except Exception as error:
                self._add_problem(f"rank {rank}, continued, does not end: {error}")

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def _damage(self, kind: str) -> bool:
        """Damage the newest checkpoint if there are two. Returns whether it is damaged."""
        good = sorted(
            path for path in (self.place.run / "checkpoints").glob("step_????????") if is_good(path)
        )
        if len(good) < 2:
            return False
        self.damaged.add(step_of(good[-1]))
        _DAMAGE[kind](good[-1])
        return not is_good(good[-1])

    def _check_checkpoints(self) -> None:
        """The newest acknowledged checkpoint is undamaged, unless a fault damaged it."""
        saved = {e["step"] for e in self._read_events("saved")} - self.damaged
        if saved and newest_good(self.place.run) < max(saved):
            self._add_problem(f"the acknowledged checkpoint of step {max(saved)} is lost")

    def _finish(self, ended: starting.Ended) -> None:
        events = self._read_events()
        for one in self.outcome.happened:
            later = [e["at"] for e in events if e["event"] == "step" and e["at"] > one.at]
            later += [max(ended.at.values())] if ended.is_success else []
            one.recovered_s = min(later) - one.at if later else None
        used = [(one.fault.kind, one.fault.phase) for one in self.outcome.happened]
        used += self.only_kills
        for fault in self.faults:
            if (fault.kind, fault.phase) in used:
                used.remove((fault.kind, fault.phase))
            else:
                self.outcome.unused.append(fault)
        self._check_loads(events)
        if not self.outcome.problems:
            self.outcome.problems += self._find_differences()

    def _check_loads(self, events: list[dict[str, Any]]) -> None:
        """Each start resumed from the newest checkpoint acknowledged before."""
        best = 0
        for event in events:
            if event["event"] == "saved":
                best = max(best, event["step"])
            elif event["event"] == "loaded" and event["step"] < best and best not in self.damaged:
                self._add_problem(
                    f"start {event['start']} resumed from {event['step']}, not {best}"
                )

    def _find_differences(self) -> list[str]:
        tracker = self.place.tracker if self.variant.mlflow else None
        if tracker is None:
            return list(differences(self.place.run, self.place.reference, None))
        tracker.restarts.clear()
        tracker.ensure()
        wrong = list(differences(self.place.run, self.place.reference, tracker.uri))
        if not wrong:
            return []
        # The next start of the same command sends the metrics that the server lacks.
        self._settle(self.outcome.starts, self._start(self.outcome.starts))
        return list(differences(self.place.run, self.place.reference, tracker.uri))

    def _prepare_tracker(self, number: int) -> None:
        tracker = self.place.tracker
        if not self.variant.mlflow or tracker is None:
            return
        tracker.restarts.clear()
        (self.place.folder / "tracker.pid").write_text(str(tracker.ensure()))
        if any(fault.kind == "tracker restarted" for fault in self._list_planned(number)):
            tracker.restarts.set()

    def _list_planned(self, number: int) -> list[Fault]:
        return self.plan[number] if number < len(self.plan) else []

    def _find_fault(self, event: dict[str, Any]) -> Fault:
        planned = self._list_planned(event["start"])
        return next(f for f in planned if (f.kind, f.phase) == (event["kind"], event["phase"]))

    def _list_faults(self, number: int) -> list[dict[str, Any]]:
        return [event for event in self._read_events("fault") if event["start"] >= number]

    def _read_events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = events_in(self.place.folder)
        return [event for event in found if kind in (None, event["event"])]

    def _add_problem(self, text: str) -> None:
        self.outcome.problems.append(text)


def _assign_starts(faults: Sequence[Fault]) -> list[list[Fault]]:
    """At most one fatal and one harmless fault per start. The last has no fatal fault."""
    fatal = [[fault] for fault in faults if fault.is_fatal] + [[]]
    harmless = [[fault] for fault in faults if not fault.is_fatal]
    pairs = zip_longest(fatal, harmless[: len(fatal)], fillvalue=list[Fault]())
    return [one + other for one, other in pairs]


def _flip_a_bit(checkpoint: Path) -> None:
    """In the middle of the largest tensor."""
    pieces = (piece for key in read_index(checkpoint).keys.values() for piece in key.pieces)
    largest = max(pieces, key=lambda piece: piece.length)
    path = checkpoint / largest.file
    content = bytearray(path.read_bytes())
    content[largest.at + largest.length // 2] ^= 1
    path.write_bytes(content)


def _truncate(checkpoint: Path) -> None:
    path = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


_DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped bit": _flip_a_bit,
    "truncated file": _truncate,
    "no manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
}


def run_undisturbed(folder: Path, variant: Variant, timeout_s: float, seed: int) -> Path:
    """Make the reference: a run of the variant without faults."""
    place = Place(folder, folder / RUN, timeout_s)
    plain = dataclasses.replace(variant, mlflow=False)
    outcome = Trial(place, plain, [], "forked", seed).run()
    if outcome.problems:
        raise RuntimeError(f"the undisturbed run fails: {outcome.problems}")
    return place.run
