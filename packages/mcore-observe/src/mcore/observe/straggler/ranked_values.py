"""A value and the rank it belongs to, and the extremes that a report prints."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

__all__ = ["NOBODY", "Extremes", "_StragglerData", "_ValueWithRank", "extremes_of"]

Extremes: TypeAlias = "tuple[tuple[float, int], tuple[float, int]]"  # smallest and largest
NOBODY: Extremes = ((math.nan, -1), (math.nan, -1))


class _ValueWithRank:
    """A number, the rank that measured it and its unit.

    ``<``, ``>``, ``<=`` and ``>=`` compare the values alone; ``==`` compares all three.

    Args:
        value: The number.
        rank: The rank.
        unit: Its unit, for the text.

    Example:
        >>> slow, fast = _ValueWithRank(48.0, 3, "ms"), _ValueWithRank(20.0, 1, "ms")
        >>> str(fast), fast < slow, slow()
        ('20.00ms/1', True, (48.0, 3, 'ms'))
    """

    __slots__ = ("_rank", "_unit", "_value")

    def __init__(self, value: float, rank: int, unit: str = "") -> None:
        self._value = value
        self._rank = rank
        self._unit = unit

    def __call__(self) -> tuple[float, int, str]:
        """Return the value, the rank and the unit."""
        return self._value, self._rank, self._unit

    def __lt__(self, other: _ValueWithRank) -> bool:
        return self._value < other._value

    def __gt__(self, other: _ValueWithRank) -> bool:
        return self._value > other._value

    def __le__(self, other: _ValueWithRank) -> bool:
        return self._value <= other._value

    def __ge__(self, other: _ValueWithRank) -> bool:
        return self._value >= other._value

    def __eq__(self, other: object) -> bool:
        return self() == other() if isinstance(other, _ValueWithRank) else NotImplemented

    def __hash__(self) -> int:
        return hash(self())

    def __str__(self) -> str:
        return f"{self._value:.2f}{self._unit}/{self._rank}"

    def __repr__(self) -> str:
        return f"_ValueWithRank({self._value!r}, {self._rank!r}, {self._unit!r})"


@dataclass
class _StragglerData:
    """Smallest and largest value of each metric over the ranks, with NaN and rank -1 for none.

    Attributes:
        min_elapsed: Time of the compute ranges per iteration, ms.
        max_elapsed: The same, of the slowest rank.
        min_btime: Longest data range, ms.
        max_btime: The same, of the slowest rank.
        min_temp: GPU temperature, C.
        max_temp: The same, of the hottest.
        min_power: GPU power, W.
        max_power: The same, of the highest.
        min_util: GPU utilisation, %.
        max_util: The same, of the busiest.
        min_clock: GPU clock, MHz.
        max_clock: The same, of the fastest.
        aflops: Estimated throughput of every rank, TFLOP/s, ascending; None where not asked for.

    Example:
        >>> str(_StragglerData().min_power)
        'nanW/-1'
    """

    min_elapsed: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "ms"))
    max_elapsed: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "ms"))
    min_btime: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "ms"))
    max_btime: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "ms"))
    min_temp: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "C"))
    max_temp: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "C"))
    min_power: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "W"))
    max_power: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "W"))
    min_util: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "%"))
    max_util: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "%"))
    min_clock: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "MHz"))
    max_clock: _ValueWithRank = field(default_factory=partial(_ValueWithRank, math.nan, -1, "MHz"))
    aflops: list[_ValueWithRank] | None = None


def extremes_of(values: Sequence[float], ranks: Sequence[int]) -> Extremes:
    """Find the smallest and the largest value, and the lowest rank that has each.

    Args:
        values: One of each rank; those that are not finite take no part.
        ranks: The rank of each value, all different.

    Returns:
        ``(smallest, rank), (largest, rank)``; NaN and -1 where no value is finite.

    Example:
        >>> extremes_of([3.0, 1.0, 3.0, math.nan], [0, 1, 2, 3])
        ((1.0, 1), (3.0, 0))
    """
    pairs = zip(values, ranks, strict=True)
    is_finite = math.isfinite(sum(values))  # where it is not, a sum too large costs time only
    by_value = sorted(pairs if is_finite else (pair for pair in pairs if math.isfinite(pair[0])))
    if not by_value:
        return NOBODY
    largest = by_value[-1][0]
    return by_value[0], by_value[bisect_left(by_value, (largest, -1))]
