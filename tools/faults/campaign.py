"""Runs trials, one or several at a time, until a limit of minutes or faults is reached."""

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
from faults.trial import RUN, Outcome, Place, Trial, run_undisturbed
from faults.verdict import newest_good

_FAULTS_A_TRIAL = 6
# The launchers of the trials in turn. A real launcher is rare: it imports torch in every process.
LAUNCHERS = (
    "forked", "hatch", "forked", "torchrun", "forked", "container", "forked", "command", "forked",
    "forked", "forked", "agents",
)  # fmt: skip
_MOST_FAULTS = {"agents": MAX_RESTARTS}  # each fault restarts the other agent
_ONE_AT_A_TIME = {"disk", "mlflow"}  # all trials share one disk and one server


class Campaign:
    """Draws faults in the order of a seed, deals them to trials, and records the outcomes.

    An interrupted campaign continues in its folder.
    """

    def __init__(
        self, folder: Path, seed: int, *, timeout_s: float, disk: Path | None,
        is_chosen: Callable[[Fault], bool] = lambda fault: True,
        launchers: tuple[str, ...] = LAUNCHERS, report: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.disk = disk
        with_disk = disk is not None
        self.launchers = [
            name
            for name in launchers
            if any(map(is_chosen, all_faults(random.Random(seed), with_disk, name)))
        ]
        if not self.launchers:
            raise ValueError(f"no launcher of {', '.join(sorted(set(launchers)))} has such faults")
        self.report = report
        self.journal = Journal(folder, seed, timeout_s)
        self.result = self.journal.result
        happened = {
            name: [one.fault for one in self.result.happened if one.launcher == name]
            for name in set(self.launchers)
        }
        self.dealer = Dealer(seed, happened, with_disk=with_disk, is_chosen=is_chosen)
        self._lateness = Lateness()
        self._tracker: Tracker | None = None
        self._references: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._recorded_at = time.time()

    def run(self, *, faults: int, until: float, at_once: int) -> Result:
        """Run trials until so many faults have happened, or until a time of ``time.time()``."""
        self._recorded_at = time.time()
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
            with self._lock:
                left = faults - len(self.result.happened)
                if left <= 0 or time.time() > until:
                    return
                number = self.result.next_trial
                self.result.next_trial += 1
                launcher = self.launchers[number % len(self.launchers)]
                count = min(_MOST_FAULTS.get(launcher, _FAULTS_A_TRIAL), left)
                variant, dealt = self.dealer.deal(launcher, count, number, frozenset(self._busy))
                self._busy |= {variant} & _ONE_AT_A_TIME
                reference = self._make_reference(variant)
            outcome = self._run_trial(number, launcher, variant, dealt, reference)
            with self._lock:
                self._busy.discard(variant)
                self._record(number, launcher, variant, outcome)

    def _run_trial(
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
        except Exception as error:  # an error of the campaign is reported like one of the job
            return Outcome(problems=[f"{type(error).__name__}: {error}"], unused=dealt)

    def _record(self, number: int, launcher: str, variant: str, outcome: Outcome) -> None:
        name = f"trial-{number:03d}"
        self.dealer.put_back(launcher, outcome.unused)
        seconds, self._recorded_at = time.time() - self._recorded_at, time.time()
        self.journal.add(name, outcome, seconds)
        for one in outcome.happened:
            ended = "" if one.ended_s is None else f", ended after {one.ended_s:.1f} s"
            recovered = f"after {one.recovered_s:.1f} s" if one.recovered_s is not None else "not"
            line = f"{one.fault}{ended}, recovered {recovered}"
            self.report(f"{name} {launcher} {variant}: {line}")
        for problem in outcome.problems:
            self.report(f"{name} {launcher} {variant}: PROBLEM: {problem}")
        self.report(f"{name} {launcher} {variant}: {len(self.result.happened)} faults so far")

    def _make_reference(self, variant: str) -> Path:
        if VARIANTS[variant].mlflow and self._tracker is None:
            self._tracker = Tracker(self.folder)
        if variant not in self._references:
            folder = self.folder / f"undisturbed-{variant}"
            # An interrupted session may have left a part of it.
            if newest_good(folder / RUN) < STEPS:
                shutil.rmtree(folder, ignore_errors=True)
                run_undisturbed(folder, VARIANTS[variant], self.result.timeout_s, self.result.seed)
            self._references[variant] = folder / RUN
        return self._references[variant]
