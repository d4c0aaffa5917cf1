"""Texts for a terminal: without control characters, and values as bars in one line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BARS = "".join(map(chr, range(0x2581, 0x2589)))
ASCII_BARS = "_.-~=+*#"  # for terminals without Unicode
_WIDTH = 32


def plain(text: str, most: int | None = None) -> str:
    """Return a text in one line that cannot control a terminal, cut after ``most`` characters.

    Characters that are not printable become spaces: line ends, escape sequences, marks that
    reverse the direction of text.
    """
    shown = text if most is None else text[: most + 1]
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else " " for char in shown)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 3]}..."


def sparkline(
    values: Sequence[float],
    width: int = _WIDTH,
    *,
    ends: tuple[float, float] | None = None,
    bars: str = BARS,
) -> str:
    """Draw values as bars of eight heights. A value that is not finite is a cross.

    Args:
        values: The values. If there are more than ``width``, neighbours are averaged.
        width: The maximum number of characters.
        ends: The values of the lowest and the highest bar. None: smallest and largest value.
        bars: Eight characters, from low to high.

    Returns:
        The line.

    Example:
        >>> sparkline([0.0, 1.0, 4.0, 7.0], bars=ASCII_BARS)
        '_.=#'
    """
    count = min(width, len(values))
    edges = [index * len(values) // max(count, 1) for index in range(count + 1)]
    parts = [values[start:end] for start, end in itertools.pairwise(edges)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = ends or (min(finite, default=0.0), max(finite, default=0.0))
    return "".join(_draw_bar(mean, low, high, bars) for mean in means)


def _draw_bar(value: float, low: float, high: float, bars: str) -> str:
    if not math.isfinite(value):
        return "x"
    # Halves, because the difference of two floats may overflow.
    height = 0.5 if high <= low else (value / 2 - low / 2) / (high / 2 - low / 2)
    return bars[round(min(max(height, 0.0), 1.0) * 7)]
