"""Trials one after the other, or a few at once, until enough has happened."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from faults.deck import VARIANTS, Fault, all_faults, phase_of, shuffled
from faults.tracker import Tracker
from faults.trial import Happened, Outcome, Place, Trial, undisturbed

DISK_BYTES = 48 << 20
_FAULTS_A_TRIAL = 6
# Of the trials in turn, those under a real launcher: each imports torch in every process.
LAUNCHERS = ("forked", "forked", "forked", "torchrun", "forked", "forked", "forked", "command")


@dataclass
class Result:
    """What a campaign has done.

    Attributes:
        failed: the trial's folder and its problems.
    """

    seed: int
    timeout_s: float
    happened: list[Happened] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)
    trials: int = 0
    starts: int = 0
    seconds: float = 0.0


class Campaign:
    """Draws faults in the order of a seed, deals them out to trials and takes in what they say."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        timeout_s: float,
        disk: Path | None,
        chosen: Callable[[Fault], bool] = lambda fault: True,
        launchers: tuple[str, ...] = LAUNCHERS,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.disk = disk
        with_disk = disk is not None
        self.launchers = [
            name
            for name in launchers
            if any(map(chosen, all_faults(random.Random(seed), with_disk, name)))
        ]
        if not self.launchers:
            raise ValueError(f"no launcher of {', '.join(sorted(set(launchers)))} has such faults")
        self.say = say
        self.result = Result(seed, timeout_s)
        self._tracker: Tracker | None = None
        self._references: dict[str, Path] = {}
        self._taking = threading.Lock()
        self._decks = {
            name: filter(chosen, shuffled(seed, with_disk=with_disk, launcher=name))
            for name in set(self.launchers)
        }
        self._back: dict[str, deque[Fault]] = {name: deque() for name in self._decks}
        self._disk_is_free = threading.Lock()
        self._tracker_is_free = threading.Lock()

    def run(self, *, faults: int, until: float, at_once: int) -> Result:
        """Run trials until so many faults have happened or it is so late."""
        began = time.time()
        try:
            with ThreadPoolExecutor(at_once) as pool:
                workers = [pool.submit(self._work, faults, until) for _ in range(at_once)]
                for worker in workers:
                    worker.result()
        finally:
            if self._tracker is not None:
                self._tracker.close()
        self.result.seconds = time.time() - began
        return self.result

    def _work(self, faults: int, until: float) -> None:
        while True:
            with self._taking:
                if len(self.result.happened) >= faults or time.time() > until:
                    return
                number, self.result.trials = self.result.trials, self.result.trials + 1
                launcher = self.launchers[number % len(self.launchers)]
                left = faults - len(self.result.happened)
                variant, dealt = self._deal(launcher, min(_FAULTS_A_TRIAL, left))
                reference = self._reference(variant)
            with self._alone(variant):
                outcome = self._trial(number, launcher, variant, dealt, reference)
            with self._taking:
                self._take_in(number, launcher, variant, outcome)

    def _trial(
        self, number: int, launcher: str, variant: str, dealt: list[Fault], reference: Path
    ) -> Outcome:
        tracker = self._tracker if VARIANTS[variant].mlflow else None
        disk = self.disk if VARIANTS[variant].small_disk else None
        folder = self.folder / f"trial-{number:03d}"
        place = Place(folder, reference, self.result.timeout_s, tracker, disk)
        try:
            return Trial(place, VARIANTS[variant], dealt, launcher, self.result.seed).run()
        except Exception as error:  # of the campaign itself: told like a problem of the job
            return Outcome(problems=[f"{type(error).__name__}: {error}"], unused=[])

    def _take_in(self, number: int, launcher: str, variant: str, outcome: Outcome) -> None:
        name = f"trial-{number:03d}"
        self.result.happened += outcome.happened
        self.result.starts += outcome.starts
        self._back[launcher].extend(outcome.unused)
        for one in outcome.happened:
            self.say(f"{name} {launcher} {variant}: {one.fault}{_times(one)}")
        for problem in outcome.problems:
            self.result.failed.setdefault(name, []).append(problem)
            self.say(f"{name} {launcher} {variant}: PROBLEM: {problem}")
        self.say(f"{name} {launcher} {variant}: {len(self.result.happened)} faults so far")

    def _deal(self, launcher: str, count: int) -> tuple[str, list[Fault]]:
        """Take faults that one run may have; those at its end come last, one of them."""
        back, deck = self._back[launcher], self._decks[launcher]
        first = back.popleft() if back else next(deck)
        variant = first.variants[self.result.trials % len(first.variants)]
        dealt, passed = [first], list[Fault]()
        while len(dealt) < count and len(passed) < 4 * count:
            fault = back.popleft() if back else next(deck)
            ends = phase_of(fault.phase).is_last and any(
                phase_of(other.phase).is_last for other in dealt
            )
            fits = variant in fault.variants and not ends
            (dealt if fits else passed).append(fault)
        back.extend(passed)
        return variant, sorted(dealt, key=lambda fault: phase_of(fault.phase).is_last)

    def _reference(self, variant: str) -> Path:
        if VARIANTS[variant].mlflow and self._tracker is None:
            self._tracker = Tracker(self.folder)
        if variant not in self._references:
            folder = self.folder / f"undisturbed-{variant}"
            self._references[variant] = undisturbed(
                folder, VARIANTS[variant], self.result.timeout_s, self.result.seed
            )
        return self._references[variant]

    @contextlib.contextmanager
    def _alone(self, variant: str) -> Iterator[None]:
        """What has one disk or one server for all trials has one trial at a time."""
        lock = {"disk": self._disk_is_free, "mlflow": self._tracker_is_free}.get(variant)
        with lock or contextlib.nullcontext():
            yield


def _times(one: Happened) -> str:
    ended = "" if one.ended_s is None else f", ended after {one.ended_s:.1f} s"
    on = "not recovered" if one.recovered_s is None else f"on after {one.recovered_s:.1f} s"
    return f"{ended}, {on}"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of 48 MiB in memory, seen by this process and those it starts; else None."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=False)
