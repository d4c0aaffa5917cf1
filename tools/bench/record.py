"""The journal with the figures of each suite, and the page made of it."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench.suites
from bench.measure import Row
from bench.running import SuiteResult
from results.journal import JournalError, read_journal, write_whole
from results.machine import join_facts
from results.page import format_duration, markdown_table, read_head

COLUMNS = ("case", "here", "compared with", "ratio", "aim", "checked first", "note")
_FORMAT = 1


def read_results(path: Path) -> dict[str, SuiteResult]:
    """The results of each suite in a file that need not exist."""
    return {result.suite: result for result in read_journal(path, _parse_result)}


def keep(path: Path, result: SuiteResult) -> dict[str, SuiteResult]:
    """Replace the suite's earlier results. Returns the results of all suites."""
    results = {**read_results(path), result.suite: result}
    write_whole(path, "".join(_format_line(results[name]) for name in sorted(results)))
    return results


def page(results: Mapping[str, SuiteResult]) -> str:
    """The page of all suites. The facts that all share are at its head."""
    machines = [result.machine for result in results.values()]
    common = {
        label: text
        for label, text in (machines[0] if machines else {}).items()
        if all(machine.get(label) == text for machine in machines)
    }
    sections = [_format_section(results[name], common) for name in sorted(results)]
    head = f"{join_facts(common)}\n" if common else ""
    return "\n".join([read_head(__file__), head, *sections]).rstrip() + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one row, in the order of ``COLUMNS``."""
    return (
        row.case, format_duration(row.ours_s), f"{format_duration(row.peer_s)}, {row.peer}",
        "-" if math.isnan(row.ratio) else f"{row.ratio:.2f}",
        "" if row.target is None else f"{row.target:.3g}{'' if row.met else ', missed'}",
        row.agreement, row.note,
    )  # fmt: skip


def _format_section(result: SuiteResult, common: Mapping[str, str]) -> str:
    """A suite's title, date, machine and table, and the remarks of its module."""
    title, _, remarks = _read_docstring(result.suite).partition("\n\n")
    special = {name: text for name, text in result.machine.items() if name not in common}
    before, after = result.load
    run = (
        f"{result.when}, {result.seconds:.0f} s, load average {before} before and {after} after"
        f"{', ' * bool(special)}{join_facts(special)}."
    )
    columns = list(zip(COLUMNS, *map(cells, result.rows), strict=True))
    # A column without any text is left out.
    head, *lines = zip(*(column for column in columns if any(column[1:])), strict=True)
    parts = [f"## {result.suite}", title, run, markdown_table(head, lines), remarks.rstrip()]
    return "".join(f"{part}\n\n" for part in parts if part).removesuffix("\n")


def _read_docstring(suite: str) -> str:
    """The docstring of a suite's module, which is not imported: its peer may be missing."""
    (folder,) = bench.suites.__path__
    file = Path(folder, f"{suite.replace('-', '_')}.py")
    if not file.is_file():
        raise JournalError(f"there is no suite {suite!r}")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or suite


def _format_line(result: SuiteResult) -> str:
    data = {"format": _FORMAT, **asdict(result)}
    del data["missing"], data["error"]
    return json.dumps(data) + "\n"


def _parse_result(data: Any) -> SuiteResult:
    if (found := data.pop("format", None)) != _FORMAT:
        raise JournalError(f"its format is {found}, and this version reads and writes {_FORMAT}")
    rows = [Row(**row) for row in data.pop("rows")]
    result = SuiteResult(**data, rows=rows)
    _format_section(result, {})  # raises if the page could not show it
    return result
