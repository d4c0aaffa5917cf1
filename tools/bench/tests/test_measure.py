"""Tests of the frame for benchmarks: timing, tables, finding and running suites, exit codes."""

import gc
import json
import math
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import bench.suites
from bench import __main__ as program
from bench import measure, table
from bench.measure import Row, paired, single
from bench.running import SuiteResult, run_suites, suite_names
from bench.table import as_data, describe_machine, format_duration, markdown_table, text_table


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
    assert lines[0].split() == ["case", "ours", "peer", "ratio", "target", "agreement", "note"]
    assert lines[2].split("  ")[0] == "add"
    start = lines[0].index("peer")
    assert lines[2][start:].startswith("6 us (numpy 2.1)")
    assert lines[3][start:].startswith("500 ms (plain)")
    assert "3.00x" in lines[2]
    assert ">= 2x met" in lines[2]
    assert ">= 1x MISSED" in lines[3]
    assert "DISAGREES: 3 against 4" in lines[4]
    assert all(line == line.rstrip() for line in lines)


def test_markdown_table_has_one_cell_per_column() -> None:
    lines = markdown_table(ROWS).splitlines()
    assert lines[0] == "| case | ours | peer | ratio | target | agreement | note |"
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- |"
    assert lines[2].endswith("| >= 2x met | equal | a\\|b |")
    assert len(lines) == 5


def test_data_is_strict_json() -> None:
    results = [SuiteResult("one", ROWS), SuiteResult("two", missing="apex"), SuiteResult("three")]
    data = json.loads(json.dumps(as_data({"date": "today"}, results), allow_nan=False))
    assert data["machine"] == {"date": "today"}
    first, _, third = data["suites"][0]["rows"]
    assert first == {
        "case": "add",
        "ours_s": 2e-6,
        "peer": "numpy 2.1",
        "peer_s": 6e-6,
        "target": 2.0,
        "agreement": "equal",
        "note": "a|b",
        "ratio": pytest.approx(3.0),
        "met": True,
    }
    assert (third["ours_s"], third["ratio"]) == (None, None)
    assert [suite["missing"] for suite in data["suites"]] == [None, "apex", None]


def test_machine_is_described_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    described = describe_machine()
    assert platform.python_version() in described["Python"]
    assert described["CPUs"].startswith(f"{os.cpu_count()} x ")
    assert described["date"].endswith("UTC")
    assert len(described["load average"].split()) == 3


def test_machine_without_torch_proc_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(type(Path())):
        def read_text(self, *_: object, **__: object) -> str:
            raise OSError

    def missing(name: str) -> str:
        raise table.metadata.PackageNotFoundError(name)

    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(table.metadata, "version", missing)
    monkeypatch.setattr(table, "Path", Nowhere)
    monkeypatch.setattr(os, "getloadavg", unknown)
    described = describe_machine()
    assert described["torch"] == "not installed"
    assert described["CPUs"].endswith(platform.machine())
    assert described["load average"] == "unknown"


SUITES = {
    "good": """
        from bench.measure import Row
        def run():
            yield Row("fast", 1.0, "peer", 2.0, target=1.5)
    """,
    "disagreeing": """
        from bench.measure import Row
        def run():
            yield Row.disagreement("sum", "peer", "3 against 4")
    """,
    "lonely": """
        def run():
            import no_such_peer.utils
            yield
    """,
    "failing": """
        from bench.measure import Row
        def run():
            yield Row("before", 1.0, "peer", 2.0)
            raise ZeroDivisionError("in the suite")
    """,
    "broken": """
        import mcore.no_such_part
        def run():
            return []
    """,
}


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with one suite for everything that can happen."""
    package = tmp_path / "planted_suites"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in SUITES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import planted_suites  # type: ignore[import-not-found]

    monkeypatch.setattr(bench.suites, "__path__", planted_suites.__path__)
    monkeypatch.setattr(bench.suites, "__name__", "planted_suites")
    yield planted_suites
    for name in [name for name in sys.modules if name.startswith("planted_suites")]:
        del sys.modules[name]


def test_suites_of_the_repository_are_found() -> None:
    assert {"versioning", "training-log"} <= set(suite_names())


@pytest.mark.usefixtures("suites")
def test_what_can_happen_to_a_suite() -> None:
    assert suite_names() == sorted(SUITES)
    results = {result.suite: result for result in run_suites(sorted(SUITES))}
    assert [row.case for row in results["good"].rows] == ["fast"]
    assert not results["good"].failed
    assert results["disagreeing"].failed
    assert results["lonely"].missing == "no_such_peer"
    assert not results["lonely"].failed
    assert [row.case for row in results["failing"].rows] == ["before"]
    assert "ZeroDivisionError: in the suite" in results["failing"].error
    assert "mcore.no_such_part" in results["broken"].error
    assert results["broken"].missing == ""


@pytest.mark.usefixtures("suites")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["good"], 0),
        (["good", "lonely"], 0),
        (["lonely"], 2),
        (["good", "disagreeing"], 1),
        (["failing"], 1),
        ([], 1),
        (["nothing"], 2),
        (["--list"], 0),
    ],
)
def test_exit_codes(arguments: list[str], expected: int) -> None:
    assert program.main(arguments) == expected


@pytest.mark.usefixtures("suites")
def test_missing_peer_is_named_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["lonely"])
    output = capsys.readouterr().out
    assert "'no_such_peer', which is not installed" in output
    assert "`hatch run bench lonely`" in output


@pytest.mark.usefixtures("suites")
def test_printed_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    program.main(["good", "failing", "--json", str(file)])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "suites: broken, disagreeing, failing, good, lonely"
    assert lines[1].startswith("date: ")
    assert "load average: " in lines[1]
    assert lines[3:5] == ["good", text_table([Row("fast", 1.0, "peer", 2.0, 1.5)]).splitlines()[0]]
    assert "ZeroDivisionError: in the suite" in captured.err
    data = json.loads(file.read_text())
    assert [suite["suite"] for suite in data["suites"]] == ["good", "failing"]


@pytest.mark.usefixtures("suites")
def test_markdown_report(capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["good", "--markdown"])
    output = capsys.readouterr().out
    assert "### good\n\n| case |" in output
    assert "| fast | 1 s | 2 s (peer) | 2.00x | >= 1.5x met |" in output


@pytest.mark.usefixtures("suites")
def test_unknown_suite_names_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["good", "typo"])
    assert "no suite typo; there are: broken, disagreeing" in capsys.readouterr().err
