"""What a campaign has done, in a file with a line for each trial, so that it can go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.deck import Fault
from faults.trial import Happened, Outcome


@dataclass
class Result:
    """What a campaign has done.

    Attributes:
        failed: the trial's folder and its problems.
        trials: how many have ended.
        next_trial: the number of the next one; those of an interrupted campaign are left out.
        sessions: how often it was started.
    """

    seed: int
    timeout_s: float
    happened: list[Happened] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)
    trials: int = 0
    next_trial: int = 0
    starts: int = 0
    seconds: float = 0.0
    sessions: int = 1

    def add(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Take in a trial that has ended, so long after the one before."""
        self.trials += 1
        self.happened += outcome.happened
        self.starts += outcome.starts
        self.seconds += seconds
        if outcome.problems:
            self.failed[name] = list(outcome.problems)


class Journal:
    """The file of a campaign in its folder.

    Attributes:
        result: what it says.
        drawn: of each launcher, how many faults were drawn.
    """

    def __init__(self, folder: Path, seed: int, timeout_s: float) -> None:
        self._path = folder / "campaign.jsonl"
        self.drawn: dict[str, int] = {}
        self.result = Result(seed, timeout_s, sessions=0)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            self._take_in(json.loads(line))
        if not lines and any(folder.glob("trial-*")):
            raise ValueError(f"{folder} has trials of no campaign that could go on; give a new one")
        self.result.sessions += 1
        folder.mkdir(parents=True, exist_ok=True)
        self._append({"event": "start", "seed": seed, "timeout_s": timeout_s})
        numbers = [int(path.name.removeprefix("trial-")) for path in folder.glob("trial-*")]
        self.result.next_trial = 1 + max(numbers, default=-1)

    def add(
        self, name: str, launcher: str, outcome: Outcome, *, drawn: int, seconds: float
    ) -> None:
        """Take in a trial that has ended, and note it."""
        self.result.add(name, outcome, seconds)
        facts = dataclasses.asdict(outcome)
        del facts["unused"]
        self._append(
            {
                "event": "trial", "name": name, "launcher": launcher, "drawn": drawn,
                "seconds": round(seconds, 1), **facts,
            }
        )  # fmt: skip

    def happened_under(self, launcher: str) -> list[Fault]:
        """The faults that have happened under a launcher."""
        return [one.fault for one in self.result.happened if one.launcher == launcher]

    def _take_in(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "start":
            given = (self.result.seed, self.result.timeout_s)
            if (line["seed"], line["timeout_s"]) != given:
                raise ValueError(
                    f"the campaign in {self._path.parent} has seed {line['seed']} and "
                    f"--timeout-s {line['timeout_s']}, not {given[0]} and {given[1]}"
                )
            self.result.sessions += 1
            return
        happened = [_happened(facts) for facts in line["happened"]]
        outcome = Outcome(happened, [], line["problems"], line["starts"])
        self.result.add(line["name"], outcome, line["seconds"])
        launcher = line["launcher"]
        self.drawn[launcher] = max(self.drawn.get(launcher, 0), line["drawn"])

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _happened(facts: dict[str, Any]) -> Happened:
    fault = facts.pop("fault")
    return Happened(Fault(**{**fault, "variants": tuple(fault["variants"])}), **facts)
