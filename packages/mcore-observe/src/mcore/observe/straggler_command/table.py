"""Views of controllers as lines of text, and as one JSON object for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore.observe.sparkline import BARS, sparkline
from mcore.observe.straggler_command.snapshot import SENSORS, Row, View

_UNITS = {"data_ms": "ms", "etpt_tf": "TFLOP/s", **SENSORS}
_SPARK = 16
_MOST_NAMED = 3
_MOST_CHARACTERS = 24  # of a host or a list of sections
_BY_NEED = ("rank", "value", "x median", "host", "slow in", "of late", "device")
_TO_THE_LEFT = ("host", "slow in", "of late", "device")


def headline(view: View) -> str:
    """The state of a job in a line: on or off, ranks, reports and the age of the last one."""
    if view.error is not None:
        return f"{view.address}  NO ANSWER: {view.error}"
    age = view.report_age_s
    parts = [
        view.address,
        _switch(view.status),
        f"{view.status['world_size']} ranks",
        "no report yet" if age is None else f"report {view.status['reports']}, {_age(age)} ago",
    ]
    return "  ".join(parts)


def verdict(view: View) -> str:
    """Who is slow, in a line; empty where nobody knows."""
    if view.report is None or view.error is not None:
        return ""
    if not view.slow:
        return "no rank is slow"
    signs: dict[str, list[str]] = {}
    for one in view.slow:
        signs.setdefault(one.who, []).append(str(one))
    named = [f"{who} ({', '.join(of_who)})" for who, of_who in signs.items()]
    more = len(named) - _MOST_NAMED
    return "SLOW: " + ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def columns(view: View, most: int, *, bars: str = BARS) -> dict[str, list[str]]:
    """The slowest ranks by column; none for a controller that does not answer."""
    rows = [] if view.error is not None else view.rows(most)
    late = [value for row in rows for value in row.late if math.isfinite(value)]
    ends = (min(late, default=0.0), max(late, default=0.0))
    by_title = {
        "rank": [str(row.rank) for row in rows],
        "host": [_clipped(row.host) for row in rows],
        value_title(view): [_figure(row.value) for row in rows],
        "x median": [_figure(row.times_median, ".2f") for row in rows],
        "device": [_device(row) for row in rows],
        "slow in": [_clipped(", ".join(row.slow_in)) for row in rows],
        "of late": [sparkline(row.late[-_SPARK:], _SPARK, ends=ends, bars=bars) for row in rows],
    }
    return {title: cells for title, cells in by_title.items() if any(cells)}


def value_title(view: View) -> str:
    """The title of the column of values: the metric with its unit."""
    unit = _UNITS.get(view.metric, "ms")
    return "step ms" if view.metric == "elapsed_ms" else f"{view.metric.partition('_')[0]} {unit}"


def lines(view: View, most: int, width: int, *, bars: str = BARS) -> Iterator[str]:
    """A job as text, no line wider than the terminal; columns that do not fit are left out."""
    yield headline(view)[:width]
    if text := verdict(view):
        yield text[:width]
    by_title = fitting(columns(view, most, bars=bars), width)
    for cells in zip(*([title, *rest] for title, rest in by_title.items()), strict=True):
        padded = (
            cell.ljust(width_of(title, by_title[title]))
            if title in _TO_THE_LEFT
            else cell.rjust(width_of(title, by_title[title]))
            for title, cell in zip(by_title, cells, strict=True)
        )
        yield "  ".join(padded).rstrip()[:width]
    if by_title and view.report is not None and (hidden := len(view.report.ranks) - most) > 0:
        yield f"({hidden} more ranks)"[:width]


def fitting(by_title: Mapping[str, list[str]], width: int) -> dict[str, list[str]]:
    """The columns that a terminal has room for, in their order; the most telling stay."""
    need = {title: _BY_NEED.index(title) if title in _BY_NEED else 1 for title in by_title}
    left = width + 2
    kept: list[str] = []
    for title in sorted(by_title, key=lambda one: need[one]):
        left -= width_of(title, by_title[title]) + 2
        if left >= 0 or not kept:
            kept.append(title)
    return {title: cells for title, cells in by_title.items() if title in kept}


def width_of(title: str, cells: Sequence[str]) -> int:
    """The characters that a column takes."""
    return max(map(len, (title, *cells)))


def as_json(views: Sequence[View], most: int) -> dict[str, Any]:
    """What ``watch --once --json`` prints: whether a rank is slow, and each controller."""
    return {
        "slow": any(view.slow for view in views),
        "unreachable": sum(view.error is not None for view in views),
        "controllers": [_controller(view, most) for view in views],
    }


def _controller(view: View, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {"address": view.address, "error": view.error}
    if view.error is not None:
        return found
    keys = ("enabled", "pending", "world_size", "reports", "last_report_unix")
    found |= {key: view.status.get(key) for key in keys}
    return found | {
        "report_age_s": view.report_age_s,
        "metric": view.metric,
        "slow": [_finite(vars(one)) for one in view.slow],
        "slowest": [_row(row) for row in view.rows(most)],
    }


def _row(row: Row) -> dict[str, Any]:
    known = {"rank": row.rank, "host": row.host, "device": row.device, "value": row.value}
    more = {"times_median": row.times_median, "slow_in": list(row.slow_in)}
    return _finite(known | more | row.sensors)


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def _switch(status: Mapping[str, Any]) -> str:
    word = "on" if status.get("enabled") else "off"
    pending = status.get("pending")
    return word if pending is None else f"{word} ({'on' if pending else 'off'} after a report)"


def _device(row: Row) -> str:
    """The name of a rank's device and what it tells about itself."""
    known = {name: value for name, value in row.sensors.items() if math.isfinite(value)}
    readings = (f"{value:.0f}{SENSORS[name]}" for name, value in known.items())
    return " ".join((_clipped(row.device), *readings)).strip()


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _figure(value: float, form: str = ".4g") -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 2]}.."
