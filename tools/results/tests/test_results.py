"""Tests of journals, of tables, of the facts about the machine, and of the recorded pages."""

import math
import os
import platform
import re
import sys
from pathlib import Path

import pytest

from bench.record import page, read_results
from bench.running import suite_names
from layouts.__main__ import main as layouts
from results import RECORDS
from results.journal import JournalError, append_line, read_journal, write_whole
from results.machine import describe_machine, load_average, timestamp
from results.page import format_duration, markdown_table, text_table


def test_a_journal_keeps_lines_of_an_interrupted_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert list(read_journal(path, dict)) == []
    append_line(path, {"case": 1})
    path.write_text(path.read_text() + '{"case": 2')
    append_line(path, {"case": 3})
    with pytest.raises(JournalError, match=r"results.jsonl, line 2 is no result"):
        list(read_journal(path, dict))
    broken: list[str] = []
    assert list(read_journal(path, dict, broken.append)) == [{"case": 1}, {"case": 3}]
    assert len(broken) == 1
    write_whole(path, "")
    assert list(read_journal(path, dict)) == []
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"), (2.5e-10, "0.25 ns"), (8.31e-8, "83.1 ns"), (1.5e-6, "1.5 us"),
        (4.2e-3, "4.2 ms"), (75.0, "75 s"), (-3e-6, "-3 us"), (math.nan, "-"),
    ],
)  # fmt: skip
def test_durations_have_a_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_tables() -> None:
    assert text_table(["a", "long"], [["123", ""], ["4", "5"]]) == (
        "a    long\n---  ----\n123\n4    5"
    )
    table = markdown_table(["a", "b", ""], [["1|2", "", "two\nlines"]], right=["b"])
    assert table == "| a | b | |\n|---|--:|---|\n| 1\\|2 | | two lines |"


def test_machine_is_described_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    described = describe_machine("pytest", "no-such-peer")
    assert list(described) == ["Python", "torch", "pytest", "no-such-peer", "CPUs"]
    assert platform.python_version() in described["Python"]
    assert described["pytest"] == pytest.__version__
    assert described["no-such-peer"] == "not installed"
    assert described["CPUs"].startswith(f"{os.cpu_count()} x ")
    assert float(load_average()) >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", timestamp())


def test_recorded_pages_show_their_journals(tmp_path: Path) -> None:
    results = read_results(RECORDS / "benchmarks.jsonl")
    assert sorted(results) == suite_names()
    benchmarks = (RECORDS / "benchmarks.md").read_text()
    assert benchmarks == page(results), "write it with hatch run bench --page"
    path = tmp_path / "layouts.md"
    journal = str(RECORDS / "layouts.jsonl")
    assert layouts(["--resume", "--minutes=0", "--results", journal, "--output", str(path)]) == 0
    assert path.read_text() == (RECORDS / "layouts.md").read_text()
