"""Runs as a single self-contained HTML file of bounded size."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, TypeVar

from mcore.observe.files import replacing
from mcore.observe.runs.slow_ranks import SlowRank, factors_by_rank, slow_ranks
from mcore.observe.runs.tables import Run

_HERE = Path(__file__).parent
_MAX_CHARTS = 240
_MAX_POINTS = (100, 1000)  # of a curve on a page with many curves, and with few
_ALL_POINTS = 400_000
_MAP_ROWS, _MAP_COLUMNS, _MAX_MAPS = 128, 240, 24
_MAX_CHARACTERS = 400  # of a text
_MAX_SLOW = 64  # lines
_RANK_PART = re.compile(r"(?:^|(?<=[/._ -]))rank[-_ ]?(\d+)(?=$|[/._ -])", re.IGNORECASE)
_GROUPS = (
    ("Memory", r"\bmem|memory|alloc"),
    ("Gradients and learning rate", r"grad|norm|learning[ _-]rate|\blr\b|loss[ _-]scale|zeros"),
    ("Loss", r"loss|perplexity|\bppl\b|accuracy"),
    ("Experts", r"moe|expert|router|mtp"),
    ("Throughput", r"throughput|tokens?/s|samples?/s|per[_ -]sec|flops|\bmfu\b|step[ _-](time|ms)"),
    ("Timers", r"time|seconds|\bms\b|[-_]ms$"),
)
_ORDER = ("Loss", "Throughput", "Gradients and learning rate", "Memory", "Experts", "Timers")
_OTHER = "Other"
_GRADIENT_NORM = re.compile(r"\bgrad(?:ient)?[ _/-]?norm$", re.IGNORECASE)
_SPIKE_WINDOW, _FEWEST_BEFORE, _MAX_SPIKES = 50, 10, 64
_WORST_NOTE = (
    "Worst: the time divided by that of the fastest rank, or by the rank's own best time. "
    "Device readings are relative to the median."
)

T = TypeVar("T")
Point: TypeAlias = tuple[int, float]  # step and value, NaN for values that are not finite


def draw_page(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Write a page about runs with curves, slow ranks and settings. It works without a network.

    Curves of more than 1,000 points are thinned to the least and the largest value of each
    section, and the page notes it. Metrics of ``rank<number>`` become one map of ranks and steps.
    Losses that differ in a word such as "train" or "validation" share a chart. Spikes of the
    gradient norm are marked and listed: norms of more than twice the median of the 50 before them,
    and above it by more than 10 times their median absolute deviation.

    Args:
        runs: The runs. Each is a curve in the charts of its metrics.
        path: The HTML file. It is replaced in one step.

    Raises:
        OSError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.html"
        >>> draw_page([Run("first", {"loss": {1: 2.0, 2: 1.0}})], path)
        >>> "<script" in path.read_text() and "http:" not in path.read_text()
        True
    """
    script = (_HERE / "run_page.js").read_text(encoding="utf-8")
    # The digest is part of the page's content security policy: only this script may run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(page_data(runs), separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(", ".join(run.name for run in runs)),
        "digest": digest,
        "style": (_HERE / "run_page.css").read_text(encoding="utf-8"),
        "table": _format_values(runs),
        "slow": _format_slow_ranks(runs),
        # Escaped: no text in the data may begin a closing tag or a comment.
        "data": data.replace("<", "\\u003c"),
        "script": script,
    }
    template = (_HERE / "run_page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    with replacing(path) as file:
        file.write(page.encode())


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the content of the page as JSON values."""
    families = [_find_families(run) for run in runs]
    mapped = {name for each in families for of_rank in each.values() for name in of_rank.values()}
    maps = []
    for index, run in enumerate(runs):
        factors = factors_by_rank(run.slow)
        if factors:
            verdicts = _build_map("Slow ranks", index, factors, low_is_bad=False)
            maps.append(verdicts | {"isVerdict": True})
    for index, (run, each) in enumerate(zip(runs, families, strict=True)):
        for name, of_rank in each.items():
            low_is_bad = "score" in name or "util" in name or "tflops" in name
            curves = {rank: run.curves[metric] for rank, metric in of_rank.items()}
            maps.append(_build_map(name, index, curves, low_is_bad=low_is_bad))
    names = [name for name in _list_names(runs) if name not in mapped]
    constants = {name: values for name in names if (values := _find_constants(name, runs))}
    drawn = [name for name in names if name not in constants]
    charts = _choose_charts(drawn)
    num_curves = sum(name in run.curves for name in charts for run in runs)
    fewest, most = _MAX_POINTS
    num_points = min(most, max(fewest, _ALL_POINTS // max(1, num_curves)))
    return {
        "runs": [_describe_run(run) for run in runs],
        "charts": [_build_chart(name, runs, num_points) for name in charts],
        "maps": maps[:_MAX_MAPS],
        "constants": constants,
        "leftOut": {"charts": len(drawn) - len(charts), "maps": max(0, len(maps) - _MAX_MAPS)},
    }


def group_of(name: str) -> str:
    """Return the part of the page for a metric."""
    if re.search(r"loss[ _-]scale", name, re.IGNORECASE):
        return "Gradients and learning rate"
    return next(
        (group for group, pattern in _GROUPS if re.search(pattern, name, re.IGNORECASE)), _OTHER
    )


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return the least and the largest value of each section, in order, with both ends.

    A section with values that are not finite also keeps one of them, drawn as a gap.
    """
    if len(points) <= most:
        return points
    kept = [points[0]]
    # Three points of each section at most, and the two ends.
    for part in _split(points[1:-1], max(1, (most - 2) // 3)):
        finite = [point for point in part if math.isfinite(point[1])]
        ends = {max(finite, key=_value), min(finite, key=_value)} if finite else set()
        if len(finite) < len(part):
            ends.add(next(point for point in part if not math.isfinite(point[1])))
        kept += sorted(ends, key=_step)
    return [*kept, points[-1]]


def find_spikes(points: Sequence[Point]) -> list[Point]:
    """Return the gradient norms far above those before them, as :func:`draw_page` defines them.

    The first 10 values are none. Values that are not finite are left out.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    found = []
    for at in range(_FEWEST_BEFORE, len(finite)):
        before = [value for _, value in finite[max(0, at - _SPIKE_WINDOW) : at]]
        middle, value = median(before), finite[at][1]
        # Norms that vary a lot anyway, as in the first steps, are no spikes.
        if value > 2 * middle and value - middle > 10 * median(abs(v - middle) for v in before):
            found.append(finite[at])
    return found


def _build_chart(name: str, runs: Sequence[Run], num_points: int) -> dict[str, Any]:
    curves = []
    is_thinned = False
    for index, run in enumerate(runs):
        points = run.points(name)
        if not points:
            continue
        spikes = find_spikes(points)[:_MAX_SPIKES] if _GRADIENT_NORM.search(name) else []
        kept = sorted({*thinned(points, num_points), *spikes}, key=_step)
        is_thinned |= len(kept) < len(points)
        curve: dict[str, Any] = {"run": index, "x": [step for step, _ in kept]}
        curve["y"] = [_round(value) for _, value in kept]
        curve["nan"] = _count_nan(points)
        curve["spikes"] = [step for step, _ in spikes]
        if run.times:
            began = min(run.times.values())
            times = [run.times.get(step) for step, _ in kept]
            curve["t"] = [None if time is None else round(time - began, 1) for time in times]
        curves.append(curve)
    return {"name": name, "group": group_of(name), "curves": curves, "thinned": is_thinned}


def _describe_run(run: Run) -> dict[str, Any]:
    steps = sorted({step for curve in run.curves.values() for step in (min(curve), max(curve))})
    times = run.times.values()
    return {
        "name": run.name,
        "steps": [steps[0], steps[-1]] if steps else None,
        "began": min(times, default=None),
        "seconds": max(times) - min(times) if times else None,
        "settings": {name: text[:_MAX_CHARACTERS] for name, text in run.settings.items()},
        "figures": list(_summarize(run)),
    }


def _summarize(run: Run) -> Iterator[tuple[str, float | None, str]]:
    """Yield the most important numbers: a label, the number and a note."""
    losses = [name for name in run.curves if group_of(name) == "Loss"][:3]
    for name in losses:
        points = run.points(name)
        least = min((value for _, value in points if math.isfinite(value)), default=math.nan)
        count = _count_nan(points)
        more = f"; NaN at {count} of {len(points)} steps" if count else ""
        yield name, _round(points[-1][1]), f"last; least {least:.5g}{more}"
    rates = [name for name in run.curves if group_of(name) == "Throughput"]
    for name in sorted(rates, key=lambda name: ("token" not in name, "device" in name))[:2]:
        values = [value for _, value in run.points(name) if math.isfinite(value)]
        if values:
            yield name, _round(median(values)), f"median; last {values[-1]:.5g}"
    if run.slow:
        named = Counter(rank for slow in run.slow.values() for rank in {one.rank for one in slow})
        [*most] = named.most_common(1)
        text = "".join(f"rank {rank} in {count} of " for rank, count in most) or "in "
        yield "slow ranks", len(named), f"{text}{len(run.slow)} reports"


def _build_map(
    name: str, index: int, curves: Mapping[int, Mapping[int, float]], *, low_is_bad: bool
) -> dict[str, Any]:
    """Return cells by rank and step. A cell has the worst value of its ranks and steps."""
    ranks = sorted(curves)
    steps = sorted({step for curve in curves.values() for step in curve})
    worst = min if low_is_bad else max
    rows, columns = list(_split(ranks, _MAP_ROWS)), list(_split(steps, _MAP_COLUMNS))
    return {
        "name": name,
        "run": index,
        "ranks": [_format_ends(row) for row in rows],
        "steps": [_format_ends(column) for column in columns],
        "cells": [
            [_find_worst([curves[rank] for rank in row], column, worst) for column in columns]
            for row in rows
        ],
        "lowIsBad": low_is_bad,
        "thinned": len(rows) < len(ranks) or len(columns) < len(steps),
    }


def _find_worst(
    curves: Sequence[Mapping[int, float]], steps: Sequence[int], worst: Any
) -> float | None:
    values = (curve.get(step, math.nan) for curve in curves for step in steps)
    found = worst((value for value in values if math.isfinite(value)), default=None)
    return None if found is None else _round(found)


def _find_families(run: Run) -> dict[str, dict[int, str]]:
    """Return names with several ranks by their common part and rank: ``rank*/ms``, 3."""
    found: dict[str, dict[int, str]] = {}
    for name in run.curves:
        of_rank = _RANK_PART.search(name)
        if of_rank is not None and len(of_rank[1]) < 10:
            shared = f"{name[: of_rank.start()]}rank*{name[of_rank.end() :]}"
            found.setdefault(shared, {})[int(of_rank[1])] = name
    return {shared: of_rank for shared, of_rank in found.items() if len(of_rank) > 1}


def _find_constants(name: str, runs: Sequence[Run]) -> list[float | None]:
    """Return the value of a metric in each run if it is constant in all, else an empty list."""
    found: list[float | None] = []
    for run in runs:
        values = set(run.curves.get(name, {}).values())
        if len(values) > 1 or (values and len(run.curves[name]) < 2):
            return []
        found.append(_round(values.pop()) if values else None)
    return found if any(value is not None for value in found) else []


def _format_values(runs: Sequence[Run]) -> str:
    """Return a table of first, last, least and largest values, the charts in text."""
    rows = []
    for name in _list_names(runs)[:_MAX_CHARTS]:
        for run in runs:
            if name in run.curves:
                texts, count = run.summarize(name, 5)
                rows.append([name, run.name, *texts, str(count)])
    titles = ("metric", "run", "steps", "first", "last", "least", "largest", "NaN")
    return _format_html_table(titles, rows)


def _count_nan(points: Sequence[Point]) -> int:
    return sum(not math.isfinite(value) for _, value in points)


def _format_slow_ranks(runs: Sequence[Run]) -> str:
    """Return a table of the slow ranks, empty if there were none."""
    rows = [
        [
            *((run.name,) if len(runs) > 1 else ()),
            *(str(one.rank), one.host, one.device, one.metric, f"{one.worst:.3g}x"),
            *(
                f"{len(one.steps)} of {len(run.slow)}",
                _format_ends(one.steps),
                _find_time(run, one),
            ),
        ]
        for run in runs
        for one in slow_ranks(run.slow)
    ]
    if not rows:
        return ""
    titles = ["rank", "host", "device", "what", "worst", "reports", "steps", "since (UTC)"]
    table = _format_html_table(["run"] * (len(runs) > 1) + titles, rows[:_MAX_SLOW])
    more = f"and {len(rows) - _MAX_SLOW} more. " if len(rows) > _MAX_SLOW else ""
    return f"{table}<p>{more}{_WORST_NOTE}</p>"


def _find_time(run: Run, one: SlowRank) -> str:
    """Return the time of the first report of a slow rank: that of the next step logged."""
    later = min((step for step in run.times if step >= one.steps[0]), default=None)
    if later is None:
        return "-"
    return datetime.fromtimestamp(run.times[later], timezone.utc).strftime("%Y-%m-%d %H:%M")


def _format_html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{html.escape(cell[:_MAX_CHARACTERS])}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _list_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.curves))


def _choose_charts(names: Sequence[str]) -> list[str]:
    """Return the metrics of the page in the order of their groups, a share for each group."""
    groups: dict[str, list[str]] = {group: [] for group in (*_ORDER, _OTHER)}
    # Rates per device repeat the others and come last.
    for name in sorted(names, key=lambda name: "device" in name):
        groups[group_of(name)].append(name)
    places = {name: at for group in groups.values() for at, name in enumerate(group)}
    kept = set(sorted(names, key=lambda name: places[name])[:_MAX_CHARTS])
    return [name for group in groups.values() for name in group if name in kept]


def _split(values: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    count = min(most, len(values))
    for at in range(count):
        yield values[at * len(values) // count : (at + 1) * len(values) // count]


def _format_ends(part: Sequence[int]) -> str:
    return str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"


_step, _value = itemgetter(0), itemgetter(1)


def _round(value: float) -> float | None:
    """Return a number with six digits for a small page, None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
