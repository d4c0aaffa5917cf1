"""The trials of a campaign in its journal, from which an interrupted campaign continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.deck import Fault
from faults.trial import Happened, Outcome
from results.journal import JournalError, append_line, read_journal


@dataclass
class Result:
    """The trials of a campaign so far.

    Attributes:
        failed: the problems of each trial that has some.
        trials: the number of finished trials.
        next_trial: the number of the next trial. Interrupted trials keep theirs.
        sessions: how often the campaign was started.
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
        """Add a finished trial. ``seconds`` is the time since the previous trial."""
        self.trials += 1
        self.happened += outcome.happened
        self.starts += outcome.starts
        self.seconds += seconds
        if outcome.problems:
            self.failed[name] = list(outcome.problems)


class Journal:
    """The journal of a campaign, in its folder. ``result`` has all recorded trials."""

    def __init__(self, folder: Path, seed: int, timeout_s: float) -> None:
        self._path = folder / "campaign.jsonl"
        self.result = Result(seed, timeout_s, sessions=0)
        # A line that was cut off is skipped: the faults of its trial are dealt again.
        for line in read_journal(self._path, dict, on_broken=print):
            self._replay(line)
        numbers = [int(path.name.removeprefix("trial-")) for path in folder.glob("trial-*")]
        if numbers and not self.result.sessions:
            raise JournalError(f"{folder} has trials without a journal. Use a new folder")
        self.result.sessions += 1
        self.result.next_trial = 1 + max(numbers, default=-1)
        append_line(self._path, {"event": "start", "seed": seed, "timeout_s": timeout_s})

    def add(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Add and record a finished trial."""
        self.result.add(name, outcome, seconds)
        facts = dataclasses.asdict(outcome)
        del facts["unused"]
        append_line(
            self._path, {"event": "trial", "name": name, "seconds": round(seconds, 1), **facts}
        )

    def _replay(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "start":
            expected = (self.result.seed, self.result.timeout_s)
            if (line["seed"], line["timeout_s"]) != expected:
                raise JournalError(
                    f"the campaign in {self._path.parent} has seed {line['seed']} and "
                    f"--timeout-s {line['timeout_s']}, not {expected[0]} and {expected[1]}"
                )
            self.result.sessions += 1
            return
        happened = [_parse_happened(**facts) for facts in line["happened"]]
        outcome = Outcome(happened, [], line["problems"], line["starts"])
        self.result.add(line["name"], outcome, line["seconds"])


def _parse_happened(fault: dict[str, Any], **facts: Any) -> Happened:
    return Happened(Fault(**{**fault, "variants": tuple(fault["variants"])}), **facts)
