"""A few faults of a campaign, and the damage that its checks would find."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from faults.dealing import Dealer
from faults.deck import DAMAGES, FATAL, PHASES, STEPS, VARIANTS, Fault, shuffle_faults
from faults.inside import find_function
from faults.journal import Journal, Result
from faults.report import page
from faults.trial import Happened, Outcome, Place, Trial, run_undisturbed
from faults.verdict import differences, newest_good

SEED, TIMEOUT_S = 11, 15.0
ANY = ("async",)
FAULTS = [
    Fault("exit", "backward", 0, 2, ANY), Fault("slow", "data", 1, 1, ANY),
    Fault("kill", "async save: rename", 0, 2, ANY), Fault("stop", "reduction", 1, 2, ANY),
    Fault("flipped bit", "log", 1, 10, ANY), Fault("memory", "validation", 0, 1, ANY),
    Fault("kill", "close", 1, 1, ANY),
]  # fmt: skip
pytestmark = pytest.mark.xdist_group("waits")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with a run without faults."""
    folder = tmp_path_factory.mktemp("faults")
    reference = run_undisturbed(folder / "undisturbed", VARIANTS["async"], TIMEOUT_S, SEED)
    return Place(folder / "trial", reference, TIMEOUT_S, beyond_timeout_s=120.0)


@pytest.fixture(scope="module")
def outcome(place: Place) -> Outcome:
    """The outcome of a run with faults."""
    return Trial(place, VARIANTS["async"], FAULTS, "forked", SEED).run()


def test_a_run_recovers_from_seven_faults_and_ends_like_an_undisturbed_one(
    place: Place, outcome: Outcome
) -> None:
    assert outcome.problems == []
    assert sorted(str(one.fault) for one in outcome.happened) == sorted(map(str, FAULTS))
    assert all(one.recovered_s is not None for one in outcome.happened)
    assert outcome.starts >= 7
    assert newest_good(place.run) == STEPS
    assert list((place.run / "checkpoints").glob("step_*.damaged"))
    text = page(
        Result(SEED, TIMEOUT_S, outcome.happened, trials=1, starts=outcome.starts), "it", True
    )
    assert "| recovered | 7 |" in text
    assert "| backward | 1 | exit |" in text


def test_every_kind_of_lost_data_is_found(place: Place, outcome: Outcome, tmp_path: Path) -> None:
    def wrong(name: str) -> str:
        return "; ".join(differences(tmp_path / name, place.reference, None))

    assert not outcome.problems
    for name in ("same", "doubled", "missing", "other", "weights"):
        shutil.copytree(place.run, tmp_path / name)
    assert wrong("same") == ""

    metrics = tmp_path / "doubled" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines, lines[3]]))
    assert "doubled points" in wrong("doubled")

    (tmp_path / "missing" / "metrics.jsonl").write_text("".join(lines[:-2]) + lines[-1][:9] + "\n")
    assert "missing points" in wrong("missing")
    assert "is no result" in wrong("missing")

    changed = [json.loads(line) for line in lines]
    changed[0]["lm loss"] += 1e-9
    text = "".join(json.dumps(record) + "\n" for record in changed)
    (tmp_path / "other" / "metrics.jsonl").write_text(text)
    assert wrong("other") == "metrics.jsonl: 1 other values, such as [('lm loss', 1)]"

    checkpoints = tmp_path / "weights" / "checkpoints"
    shutil.rmtree(checkpoints / f"step_{STEPS:08d}")
    earlier = newest_good(tmp_path / "weights")
    (checkpoints / f"step_{earlier:08d}").rename(checkpoints / f"step_{STEPS:08d}")
    assert "the final weights differ" in wrong("weights")


def test_the_deck_has_every_fault_in_every_phase_of_every_rank() -> None:
    for owner, name in (find_function(place) for phase in PHASES for place in phase.places):
        assert callable(getattr(owner, name))
    deck = shuffle_faults(7)
    first = [next(deck) for _ in range(1000)]
    found = {(fault.kind, fault.phase, fault.rank) for fault in first}
    for phase in PHASES:
        for kind in (kind for kind in FATAL if phase.name != "leave"):
            assert {(kind, phase.name, rank) for rank in phase.ranks} <= found
    assert {kind for kind, _, _ in found} >= set(DAMAGES)
    again = shuffle_faults(7)
    assert [next(again) for _ in range(1000)] == first
    other = shuffle_faults(8)
    assert [next(other) for _ in range(10)] != first[:10]


def test_an_interrupted_campaign_continues_with_the_other_faults(tmp_path: Path) -> None:
    first, journal = Dealer(7, {"forked": []}, with_disk=True), Journal(tmp_path, 7, 8.0)
    done: list[Fault] = []
    for turn in range(40):
        variant, dealt = first.deal("forked", 6, turn, frozenset({"disk"}))
        assert variant != "disk"
        assert all(variant in fault.variants for fault in dealt)
        happened, unused = dealt[:4], dealt[4:]
        first.put_back("forked", unused)
        outcome = Outcome(
            [Happened(fault, "forked", variant, 1.0, 0) for fault in happened], unused, [], 5
        )
        # The last trial was under way when the campaign was interrupted.
        if turn < 39:
            journal.add(f"trial-{turn:03d}", outcome, 2.0)
            done += happened

    again = Journal(tmp_path, 7, 8.0)
    assert (again.result.trials, again.result.sessions) == (39, 2)
    assert again.result.happened == journal.result.happened
    assert [one.fault for one in again.result.happened] == done
    second = Dealer(7, {"forked": done}, with_disk=True)
    for turn in range(300):
        done += second.deal("forked", 6, turn, frozenset())[1]
    order = shuffle_faults(7)
    every = Counter(next(order) for _ in range(len(done) + 100))
    assert Counter(done) <= every  # fewer than 100 faults fit in none of the last trials
    with pytest.raises(ValueError, match="has seed 7 and"):
        Journal(tmp_path, 8, 8.0)
