"""Trials one after the other, or a few at once, until enough has happened."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.dealing import Dealer
from faults.deck import STEPS, VARIANTS, Fault, all_faults
from faults.journal import Journal, Result
from faults.machine import Lateness
from faults.starting import MAX_RESTARTS
from faults.tracker import Tracker
from faults.trial import RUN, Happened, Outcome, Place, Trial, undisturbed
from faults.verdict import newest_good

_FAULTS_A_TRIAL = 6
# Of the trials in turn, those under a real launcher: each imports torch in every process.
LAUNCHERS = (
    "forked", "forked", "forked", "torchrun", "forked", "forked", "forked", "command", "forked",
    "forked", "forked", "agents",
)  # fmt: skip
_MOST_FAULTS = {"agents": MAX_RESTARTS}  # which start each other again
_ONE_AT_A_TIME = {"disk", "mlflow"}  # which have one disk or one server for all trials


class Campaign:
    """Draws faults in the order of a seed, deals them out to trials and takes in what they say.

    One that was interrupted goes on in its folder.
    """

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
        self.journal = Journal(folder, seed, timeout_s)
        self.dealer = Dealer(seed, sorted(set(self.launchers)), with_disk=with_disk, chosen=chosen)
        for launcher in set(self.launchers) & set(self.journal.drawn):
            happened = self.journal.happened_under(launcher)
            self.dealer.go_on_behind(launcher, self.journal.drawn[launcher], happened)
        self._lateness = Lateness()
        self._tracker: Tracker | None = None
        self._references: dict[str, Path] = {}
        self._taking = threading.Lock()
        self._busy: set[str] = set()
        self._noted_at = time.time()

    @property
    def result(self) -> Result:
        """What has been done."""
        return self.journal.result

    def run(self, *, faults: int, until: float, at_once: int) -> Result:
        """Run trials until so many faults have happened or it is so late."""
        self._noted_at = time.time()
        try:
            with ThreadPoolExecutor(at_once) as pool:
                workers = [pool.submit(self._work, faults, until) for _ in range(at_once)]
                for worker in workers:
                    worker.result()
        finally:
            if self._tracker is not None:
                self._tracker.close()
        return self.result

    def _work(self, faults: int, until: float) -> None:
        while True:
            with self._taking:
                left = faults - len(self.result.happened)
                if left <= 0 or time.time() > until:
                    return
                number = self.result.next_trial
                self.result.next_trial += 1
                launcher = self.launchers[number % len(self.launchers)]
                variant, dealt = self.dealer.deal(
                    launcher,
                    min(_MOST_FAULTS.get(launcher, _FAULTS_A_TRIAL), left),
                    number,
                    frozenset(self._busy),
                )
                self._busy |= {variant} & _ONE_AT_A_TIME
                reference = self._reference(variant)
            outcome = self._trial(number, launcher, variant, dealt, reference)
            with self._taking:
                self._busy.discard(variant)
                self._take_in(number, launcher, variant, outcome)

    def _trial(
        self, number: int, launcher: str, variant: str, dealt: list[Fault], reference: Path
    ) -> Outcome:
        tracker = self._tracker if VARIANTS[variant].mlflow else None
        disk = self.disk if VARIANTS[variant].small_disk else None
        place = Place(
            self.folder / f"trial-{number:03d}", reference, self.result.timeout_s, tracker, disk,
            late_s=self._lateness.between,
        )  # fmt: skip
        try:
            return Trial(place, VARIANTS[variant], dealt, launcher, self.result.seed).run()
        except Exception as error:  # of the campaign itself: told like a problem of the job
            return Outcome(problems=[f"{type(error).__name__}: {error}"], unused=dealt)

    def _take_in(self, number: int, launcher: str, variant: str, outcome: Outcome) -> None:
        name = f"trial-{number:03d}"
        self.dealer.give_back(launcher, outcome.unused)
        seconds, self._noted_at = time.time() - self._noted_at, time.time()
        drawn = self.dealer.drawn(launcher)
        self.journal.add(name, launcher, outcome, drawn=drawn, seconds=seconds)
        for one in outcome.happened:
            self.say(f"{name} {launcher} {variant}: {one.fault}{_times(one)}")
        for problem in outcome.problems:
            self.say(f"{name} {launcher} {variant}: PROBLEM: {problem}")
        self.say(f"{name} {launcher} {variant}: {len(self.result.happened)} faults so far")

    def _reference(self, variant: str) -> Path:
        if VARIANTS[variant].mlflow and self._tracker is None:
            self._tracker = Tracker(self.folder)
        if variant not in self._references:
            folder = self.folder / f"undisturbed-{variant}"
            if newest_good(folder / RUN) < STEPS:  # of an earlier session there is none
                shutil.rmtree(folder, ignore_errors=True)
                undisturbed(folder, VARIANTS[variant], self.result.timeout_s, self.result.seed)
            self._references[variant] = folder / RUN
        return self._references[variant]


def _times(one: Happened) -> str:
    ended = "" if one.ended_s is None else f", ended after {one.ended_s:.1f} s"
    on = "not recovered" if one.recovered_s is None else f"on after {one.recovered_s:.1f} s"
    return f"{ended}, {on}"
