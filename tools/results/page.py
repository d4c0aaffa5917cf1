"""Tables as text, aligned or Markdown."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_duration(seconds: float) -> str:
    """Three significant digits with a suitable unit. ``-`` if nothing was timed."""
    if math.isnan(seconds):
        return "-"
    size, unit = next((one for one in _UNITS if abs(seconds) >= one[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def text_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """An aligned table in plain text."""
    rows = [columns, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def markdown_table(
    columns: Sequence[str], lines: Iterable[Sequence[str]], right: Collection[str] = ()
) -> str:
    """A Markdown table. The columns named in ``right`` are right-aligned."""
    rule = "".join("--:|" if column in right else "---|" for column in columns)
    return "\n".join([markdown_line(columns), f"|{rule}", *map(markdown_line, lines)])


def markdown_line(texts: Iterable[str]) -> str:
    """One line of a Markdown table."""
    escaped = (" ".join(text.replace("|", "\\|").split()) for text in texts)
    return "|" + "".join(f" {text} |" if text else " |" for text in escaped)


def read_head(module: str, **values: object) -> str:
    """The first paragraphs of a page, from ``page.txt`` next to a module, with values filled in."""
    return Path(module).with_name("page.txt").read_text(encoding="utf-8").format_map(values)
