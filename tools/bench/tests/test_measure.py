"""Tests of the timing."""

import gc
import math
from collections.abc import Callable

import pytest

from bench import measure
from bench.measure import Row, compare, loop, paired, single


class Clock:
    """A clock that moves only during timed calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.calls: list[str] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now_s)

    def taking(self, name: str, *durations_s: float) -> Callable[[], None]:
        """A callable with a duration for each call. The last duration repeats."""
        remaining = list(durations_s)

        def call() -> None:
            self.calls.append(name)
            self.now_s += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_minimum_per_call_of_both_sides_and_of_one(clock: Clock) -> None:
    # The first call warms up, then two calls per repeat: 3+1, 1+1, 5+5 and 8+8, 2+4, 8+8.
    ours = clock.taking("o", 50.0, 3.0, 1.0, 1.0, 1.0, 5.0)
    peer = clock.taking("p", 50.0, 8.0, 8.0, 2.0, 4.0, 8.0)
    assert paired(ours, peer, number=2, repeats=3) == (1.0, 3.0)
    assert "".join(clock.calls) == "op" + "oopp" + "ppoo" + "oopp"
    clock.calls.clear()
    assert single(clock.taking("x", 50.0, 4.0, 2.0, 9.0, 9.0), number=2, repeats=2) == 3.0
    assert len(clock.calls) == 5
    loop(clock.taking("y", 0.0), calls=7)()
    assert clock.calls.count("y") == 7


def test_a_row_of_two_sides(clock: Clock) -> None:
    sides = clock.taking("o", 2.0), "peer", clock.taking("p", 6.0)
    row = compare(
        "case", *sides, 2.5, agreement="equal", calls=4, note=lambda o, p: f"{o} against {p}"
    )
    assert row == Row("case", 0.5, "peer", 1.5, 2.5, "equal", "0.5 against 1.5")
    assert row.ratio == pytest.approx(3.0)
    assert (row.met, row.agrees) == (True, True)
    assert compare("case", *sides, 3.5, agreement="equal").met is False
    assert compare("case", *sides, agreement="equal").met is None
    assert math.isnan(Row("case", 0.0, "peer", 1.0).ratio)
    clock.calls.clear()
    differing = compare("sum", *sides, agreement="equal", difference="3 against 4")
    assert not differing.agrees
    assert differing.agreement == "DISAGREES: 3 against 4"
    assert math.isnan(differing.ratio)
    assert clock.calls == []


def test_the_garbage_collector_pauses_while_timing_and_returns_to_its_state() -> None:
    seen = []

    def fails() -> None:
        seen.append(gc.isenabled())
        if len(seen) > 2:
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        single(fails, number=5)
    assert seen == [True, False, False]
    assert gc.isenabled()
    gc.disable()
    try:
        single(lambda: None, number=1)
        assert not gc.isenabled()
    finally:
        gc.enable()
