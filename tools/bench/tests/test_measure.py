"""Tests of the frame for benchmarks: timing, tables and the machine."""

import gc
import math
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import machine as machine_module
from bench import measure
from bench.machine import load_average, machine, now
from bench.measure import Row, paired, single
from bench.table import format_duration, markdown_table, text_table


class Clock:
    """A clock that moves only when a timed callable says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.calls: list[str] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now_s)

    def taking(self, name: str, *durations_s: float) -> Callable[[], None]:
        """A callable whose n-th call takes the n-th duration; the last one holds on."""
        remaining = list(durations_s)

        def call() -> None:
            self.calls.append(name)
            self.now_s += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_paired_returns_the_minimum_per_call(clock: Clock) -> None:
    # The first call warms up, then two calls per repeat: 3+1, 1+1, 5+5 and 8+8, 2+4, 8+8.
    ours = clock.taking("ours", 50.0, 3.0, 1.0, 1.0, 1.0, 5.0)
    peer = clock.taking("peer", 50.0, 8.0, 8.0, 2.0, 4.0, 8.0)
    assert paired(ours, peer, number=2, repeats=3) == (1.0, 3.0)


def test_paired_alternates_and_changes_who_begins(clock: Clock) -> None:
    paired(clock.taking("o", 1.0), clock.taking("p", 1.0), number=1, repeats=3)
    assert "".join(clock.calls) == "op" + "op" + "po" + "op"


def test_single_returns_the_minimum_per_call(clock: Clock) -> None:
    assert single(clock.taking("x", 50.0, 4.0, 2.0, 9.0, 9.0), number=2, repeats=2) == 3.0
    assert len(clock.calls) == 5


@pytest.mark.parametrize(("number", "repeats"), [(0, 7), (1, 0), (-1, 1)])
def test_counts_that_time_nothing_are_refused(number: int, repeats: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        paired(lambda: None, lambda: None, number=number, repeats=repeats)
    with pytest.raises(ValueError, match="at least 1"):
        single(lambda: None, number=number, repeats=repeats)


def test_collector_rests_while_timing_and_works_again_after_an_error() -> None:
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


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        single(lambda: None, number=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_slower_peer_is_really_slower() -> None:
    ours_s, peer_s = paired(lambda: sum(range(10)), lambda: sum(range(10_000)), number=50)
    assert 0 < ours_s < peer_s < 1


def test_row() -> None:
    row = Row("case", 2e-6, "peer", 6e-6, target=2.5)
    assert row.ratio == pytest.approx(3.0)
    assert row.met is True
    assert Row("case", 2e-6, "peer", 6e-6, target=3.5).met is False
    assert Row("case", 2e-6, "peer", 6e-6).met is None
    assert row.agrees
    assert math.isnan(Row("case", 0.0, "peer", 1.0).ratio)
    with pytest.raises(AttributeError):
        row.case = "other"  # type: ignore[misc]


def test_row_of_a_disagreement() -> None:
    row = Row.disagreement("sum", "numpy", "3 against 4")
    assert not row.agrees
    assert row.agreement == "DISAGREES: 3 against 4"
    assert math.isnan(row.ratio)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (2.5e-10, "0.25 ns"),
        (8.31e-8, "83.1 ns"),
        (1.5e-6, "1.5 us"),
        (4.2e-3, "4.2 ms"),
        (1.0, "1 s"),
        (75.0, "75 s"),
        (-3e-6, "-3 us"),
        (math.nan, "-"),
    ],
)
def test_durations_have_a_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


ROWS = [
    Row("add", 2e-6, "numpy 2.1", 6e-6, target=2.0, agreement="equal", note="a|b"),
    Row("a longer case", 1.0, "plain", 0.5, target=1.0),
    Row.disagreement("sum", "numpy 2.1", "3 against 4"),
]


def test_text_table_is_aligned() -> None:
    lines = text_table(ROWS).splitlines()
    assert lines[0].split("  ")[0] == "case"
    assert lines[2].split("  ")[0] == "add"
    start = lines[0].index("compared with")
    assert lines[2][start:].startswith("6 us, numpy 2.1")
    assert lines[3][start:].startswith("500 ms, plain")
    assert "3.00   2  " in lines[2]
    assert "1, missed" in lines[3]
    assert "DISAGREES: 3 against 4" in lines[4]
    assert all(line == line.rstrip() for line in lines)


def test_markdown_table_has_one_cell_per_column() -> None:
    table = markdown_table(["a", "b", ""], [["1|2", "", "two\nlines"]], right=["b"])
    assert table == "| a | b | |\n|---|--:|---|\n| 1\\|2 | | two lines |"


def test_machine_is_described_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    described = machine("pytest", "no-such-peer")
    assert list(described) == ["Python", "torch", "pytest", "no-such-peer", "CPUs"]
    assert platform.python_version() in described["Python"]
    assert described["pytest"] == pytest.__version__
    assert described["no-such-peer"] == "not installed"
    assert described["CPUs"].startswith(f"{os.cpu_count()} x ")
    assert float(load_average()) >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", now())


def test_machine_without_proc_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(type(Path())):
        def read_text(self, *_: object, **__: object) -> str:
            raise OSError

    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(machine_module, "Path", Nowhere)
    monkeypatch.setattr(os, "getloadavg", unknown)
    assert machine()["CPUs"].endswith(platform.machine())
    assert load_average() == "unknown"
