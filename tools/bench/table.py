"""Rows as a table for people (aligned text or Markdown) and as data (JSON)."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.measure import Row
from bench.running import SuiteResult

COLUMNS = ("case", "ours", "peer", "ratio", "target", "agreement", "note")
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_duration(seconds: float) -> str:
    """Three significant digits with the unit that suits; ``-`` for what was not timed."""
    if math.isnan(seconds):
        return "-"
    for size, unit in _UNITS:
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one row, in the order of ``COLUMNS``."""
    verdict = {None: "", True: " met", False: " MISSED"}[row.met]
    return (
        row.case,
        format_duration(row.ours_s),
        f"{format_duration(row.peer_s)} ({row.peer})",
        "-" if math.isnan(row.ratio) else f"{row.ratio:.2f}x",
        "" if row.target is None else f">= {row.target:g}x{verdict}",
        row.agreement,
        row.note,
    )


def text_table(rows: Iterable[Row]) -> str:
    """An aligned table in plain text."""
    lines = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown_table(rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines: list[Sequence[str]] = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in rows)]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def as_data(machine: Mapping[str, str], results: Iterable[SuiteResult]) -> dict[str, Any]:
    """Everything as JSON data; what was not timed is null."""
    return {
        "machine": dict(machine),
        "suites": [
            {
                "suite": result.suite,
                "rows": [_row_data(row) for row in result.rows],
                "missing": result.missing or None,
                "error": result.error or None,
            }
            for result in results
        ],
    }


def _row_data(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(row, name) for name in Row.__dataclass_fields__}
    data |= {"ratio": row.ratio, "met": row.met}
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in data.items()
    }


def describe_machine() -> dict[str, str]:
    """Date, Python, torch, processor and load, as label and text.

    torch is looked up by its distribution metadata and not imported.
    """
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": _distribution_version("torch"),
        "CPUs": f"{os.cpu_count()} x {_processor()}",
        "load average": _load_average(),
    }


def _distribution_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """The model name where the system tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        label, _, text = line.partition(":")
        if label.strip() == "model name":
            return text.strip()
    return platform.machine()


def _load_average() -> str:
    try:
        return " ".join(f"{load:.2f}" for load in os.getloadavg())
    except (AttributeError, OSError):
        return "unknown"
