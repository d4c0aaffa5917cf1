"""Rows as text, aligned or Markdown."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from bench.measure import Row

COLUMNS = ("case", "here", "compared with", "ratio", "aim", "checked first", "note")
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
    return (
        row.case,
        format_duration(row.ours_s),
        f"{format_duration(row.peer_s)}, {row.peer}",
        "-" if math.isnan(row.ratio) else f"{row.ratio:.2f}",
        "" if row.target is None else f"{row.target:.3g}{'' if row.met else ', missed'}",
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


def markdown_table(
    columns: Sequence[str], lines: Iterable[Sequence[str]], right: Collection[str] = ()
) -> str:
    """A Markdown table; the columns named in ``right`` are aligned there."""
    rule = "".join("--:|" if column in right else "---|" for column in columns)
    return "\n".join([markdown_line(columns), f"|{rule}", *map(markdown_line, lines)])


def markdown_line(texts: Iterable[str]) -> str:
    """One line of a Markdown table."""
    escaped = (" ".join(text.replace("|", "\\|").split()) for text in texts)
    return "|" + "".join(f" {text} |" if text else " |" for text in escaped)
