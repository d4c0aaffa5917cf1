"""Values as bars in one line of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BARS = "".join(map(chr, range(0x2581, 0x2589)))
ASCII_BARS = "_.-~=+*#"  # for terminals that have no others
_WIDTH = 32


def sparkline(
    values: Sequence[float],
    width: int = _WIDTH,
    *,
    ends: tuple[float, float] | None = None,
    bars: str = BARS,
) -> str:
    """Draw values as bars of eight heights; what is not finite is a cross.

    Args:
        values: The values; where they are more than the width, neighbours are averaged.
        width: The most characters.
        ends: What the lowest and the highest bar stand for; None for the least and the largest.
        bars: Eight characters, from low to high.

    Returns:
        The line.

    Example:
        >>> sparkline([0.0, 1.0, 4.0, 7.0], bars=ASCII_BARS)
        '_.=#'
    """
    means = [sum(part) / len(part) for part in _parts(values, width)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = ends or (min(finite, default=0.0), max(finite, default=0.0))
    return "".join(_bar(mean, low, high, bars) for mean in means)


def _bar(value: float, low: float, high: float, bars: str) -> str:
    if not math.isfinite(value):
        return "x"
    # Halves, since the difference of two floats may be beyond all floats.
    height = 0.5 if high <= low else (value / 2 - low / 2) / (high / 2 - low / 2)
    return bars[round(min(max(height, 0.0), 1.0) * 7)]


def _parts(values: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    count = min(count, len(values))
    for index in range(count):
        yield values[index * len(values) // count : (index + 1) * len(values) // count]
