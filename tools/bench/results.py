"""The file that keeps the figures of each suite, and the page that shows them."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import bench.suites
from bench.machine import joined
from bench.measure import Row
from bench.running import SuiteResult
from bench.table import COLUMNS, cells, markdown_table

T = TypeVar("T")
_FORMAT = 1
_HEAD = """# Benchmarks

Each figure comes from two sides that take turns in one process, after their results have been
compared. The ratio says how many times faster the left side is; the aim is what a change must not
fall below. On an idle machine, `hatch run bench --record` measures every suite again and
`hatch run bench tensor --record` one of them; both write this page from
[the results](benchmarks.jsonl).
"""


class ResultsError(ValueError):
    """A results file that holds something else."""


def read_lines(
    path: Path, made_of: Callable[[Any], T], refuse: Callable[[str], object]
) -> Iterator[T]:
    """Yield what is made of each line of a JSONL file; ``refuse`` is told why one is left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            made = made_of(json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            refuse(f"{path}, line {number} is no result: {error}")
        else:
            yield made


def read_results(path: Path) -> dict[str, SuiteResult]:
    """The results of each suite in a file, which need not exist."""

    def refuse(why: str) -> None:
        raise ResultsError(f"{why}. Nothing was changed; mend the file or name another one")

    return {result.suite: result for result in read_lines(path, _result_of, refuse)}


def keep(path: Path, result: SuiteResult) -> dict[str, SuiteResult]:
    """Write results in place of the suite's earlier ones; return those of all suites."""
    results = {**read_results(path), result.suite: result}
    write_whole(path, "".join(_line_of(results[name]) for name in sorted(results)))
    return results


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def page(results: Mapping[str, SuiteResult]) -> str:
    """The page of all suites; what they have in common stands at its head."""
    machines = [result.machine for result in results.values()]
    common = {
        label: text
        for label, text in (machines[0] if machines else {}).items()
        if all(one.get(label) == text for one in machines)
    }
    sections = [_section(results[name], common) for name in sorted(results)]
    return "\n".join([_HEAD, f"{joined(common)}\n" if common else "", *sections]).rstrip() + "\n"


def _section(result: SuiteResult, common: Mapping[str, str]) -> str:
    """What a suite measures, when, its table, and what its module says about it."""
    title, _, about = _docstring(result.suite).partition("\n\n")
    own = {name: text for name, text in result.machine.items() if name not in common}
    before, after = result.load
    told = (
        f"{result.when}, {result.seconds:.0f} s, load average {before} before and {after} after"
        f"{'; ' * bool(own)}{joined(own)}."
    )
    columns = list(zip(COLUMNS, *map(cells, result.rows), strict=True))
    head, *lines = zip(*(column for column in columns if any(column[1:])), strict=True)
    parts = [f"## {result.suite}", title, told, markdown_table(head, lines), about.rstrip()]
    return "".join(f"{part}\n\n" for part in parts if part).removesuffix("\n")


def _docstring(suite: str) -> str:
    """That of a suite's module, which is not imported."""
    (folder,) = bench.suites.__path__
    file = Path(folder, f"{suite.replace('-', '_')}.py")
    if not file.is_file():
        raise ResultsError(f"there is no suite {suite!r}")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or suite


def _line_of(result: SuiteResult) -> str:
    data = {"format": _FORMAT, **asdict(result)}
    del data["missing"], data["error"]
    return json.dumps(data) + "\n"


def _result_of(data: Any) -> SuiteResult:
    """A line's result, of which a section of the page can be made."""
    if (found := data.pop("format", None)) != _FORMAT:
        raise ResultsError(f"its format is {found}; this version reads and writes {_FORMAT}")
    rows: Iterable[Any] = data.pop("rows")
    result = SuiteResult(**data, rows=[Row(**row) for row in rows])
    _section(result, {})
    return result
