"""The journal with the costs of each item, and the page made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from results.journal import read_journal, write_whole
from results.machine import join_facts
from results.page import format_duration, markdown_table, read_head
from scale.meter import Cost, fit_exponent
from scale.processes import REAL

MOST_GROWTH = 1.15  # of a linear item, whose fit has noise
AIMS_S = {"common": 0.1, "busiest": 2.0, "each": 2.0}  # by the first word of the role
LARGE, LARGE_S, LARGE_BYTES = ("save-plan", "manifest"), 10.0, 2 << 30


class Result(NamedTuple):
    """An item's text, the machine and the time of its run, and its costs."""

    item: str
    text: str
    when: str
    machine: dict[str, str]
    costs: list[Cost]


def read_results(path: Path) -> dict[str, Result]:
    """The results of each item in a file that need not exist."""
    return {result.item: result for result in read_journal(path, _parse)}


def keep(path: Path, result: Result) -> None:
    """Replace the item's earlier result, and write the page next to the journal."""
    results = {**read_results(path), result.item: result}
    write_whole(path, "".join(f"{json.dumps(one._asdict())}\n" for one in results.values()))
    write_whole(path.with_suffix(".md"), page(results))


def page(results: Mapping[str, Result]) -> str:
    """The page of all items."""
    sections = [read_head(__file__).rstrip()]
    for result in results.values():
        run = f"{result.when}, {join_facts(result.machine)}."
        sections += [f"## {result.item}", result.text, run, markdown_table(*table(result))]
    return "\n\n".join(sections) + "\n"


def table(result: Result) -> tuple[list[str], list[list[str]]]:
    """The columns and the lines of an item: a line for each role."""
    sizes = [f"{size:,}" for size in sorted({cost.ranks for cost in result.costs})]
    lines = []
    for role in dict.fromkeys(cost.role for cost in result.costs):
        costs = sorted(cost for cost in result.costs if cost.role == role)
        times, last = [format_duration(cost.seconds) for cost in costs], costs[-1]
        figures = f"{fit_exponent(costs):.2f}", f"{last.peak_bytes / (1 << 20):.1f} MiB"
        sent = f"{last.sent_bytes / 1000:.3g} kB" if last.sent_bytes else ""
        growth = ((1 << 20) / last.ranks) ** max(fit_exponent(costs), 0.0)
        large = last._replace(seconds=last.seconds * growth, peak_bytes=0)
        missed, then = (find_miss(result.item, each) for each in (costs, [large]))
        lines.append([role, *times, *figures, sent, missed, format_duration(large.seconds), then])
    ends = "p", "memory", "bytes", "missed", f"at {1 << 20:,}", "missed there"
    shown = slice(-4 if result.item == REAL else None)  # no aims, and no million of processes
    return ["role", *sizes, *ends][shown], [line[shown] for line in lines]


def find_miss(item: str, costs: list[Cost]) -> str:
    """Return the aims that a role misses. Torch's work has none."""
    last, kind = costs[-1], costs[-1].role.partition(",")[0]
    if kind not in AIMS_S:
        return ""
    is_large = item in LARGE and kind != "common"
    limit_s = LARGE_S if is_large else AIMS_S[kind]
    missed = {
        "growth": fit_exponent(costs) > MOST_GROWTH,
        f"{limit_s:g} s": last.seconds > limit_s,
        "memory": is_large and last.peak_bytes > LARGE_BYTES,
    }
    return ", ".join(aim for aim, is_missed in missed.items() if is_missed)


def _parse(data: Any) -> Result:
    result = Result(**{**data, "costs": [Cost(*cost) for cost in data["costs"]]})
    table(result)  # raises if the page could not show it
    return result
