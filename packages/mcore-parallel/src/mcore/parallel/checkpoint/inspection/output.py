"""Output of the command line: tables and JSON, with a progress bar on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from mcore.parallel.shortened import counted

_BAR_CELLS = 30
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class Output:
    """Prints results, as text or JSON, to one stream and a progress bar to another."""

    def __init__(self, stream: TextIO, bar_stream: TextIO, *, as_json: bool = False) -> None:
        self._stream, self._bar_stream, self._as_json = stream, bar_stream, as_json
        self._last = ""

    def report(self, content: Any, lines: Iterable[str]) -> None:
        """Print a result, as one JSON document or as lines of text."""
        self._draw_bar("")
        if self._as_json:
            lines = [json.dumps(_make_plain(content), indent=1, allow_nan=False)]
        for line in lines:
            self._stream.write(f"{line}\n")

    def progress(self, done: int, total: int, title: str) -> None:
        """Show the progress of a command, on a terminal only. ``done`` and ``total`` are bytes."""
        share = done / total if total else 1.0
        cells = "#" * int(share * _BAR_CELLS)
        sizes = f"{size_text(done)} of {size_text(total)}"
        self._draw_bar(
            f"{escaped(title)} [{cells:.<{_BAR_CELLS}}] {int(100 * share):3d} % ({sizes})"
        )

    def _draw_bar(self, line: str) -> None:
        if line != self._last and self._bar_stream.isatty():
            self._bar_stream.write(f"\r\x1b[K{line}")
            self._bar_stream.flush()
            self._last = line


def _make_plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return value


def escaped(text: str) -> str:
    """Escape control and invisible characters, which a terminal may act on."""
    if text.isprintable():
        return text.replace("\\", "\\\\") if "\\" in text else text
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()
        for char in text
    )


def size_text(num_bytes: int) -> str:
    """Format a size for people: ``12 bytes``, ``1.5 GiB``."""
    size, place = float(num_bytes), 0
    while size >= 1024 and place < len(_UNITS) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.1f} {_UNITS[place]}" if place else counted(num_bytes, "byte")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Format rows as lines in columns, escaped. Columns of numbers are right-aligned."""
    given = [list(row) for row in rows]
    texts = [list(titles), *([escaped(str(cell)) for cell in row] for row in given)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    is_number = [
        bool(given) and all(isinstance(row[place], int) for row in given)
        for place in range(len(titles))
    ]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in texts
    ]
