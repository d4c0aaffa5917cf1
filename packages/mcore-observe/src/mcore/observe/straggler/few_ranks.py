"""The numbers of few ranks as lists: plain Python, which is faster for them than torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from operator import truediv

from mcore.observe.straggler.column_statistics import robust_spread
from mcore.observe.straggler.ranked_values import Extremes, extremes_of
from mcore.observe.straggler.rows import METRICS

__all__ = ["ListedMedians", "ListedMetrics"]


class ListedMetrics:
    """The metrics of few ranks.

    Args:
        columns: The values of all ranks for each of ``METRICS``.
        ranks: The rank of each value.

    Example:
        >>> metrics = ListedMetrics([(100.0, 101.0, 99.0, 100.0, 150.0)] * 7, range(5))
        >>> metrics.center_and_spread("elapsed_ms", side=1, min_z=3.5)
        (100.0, 1.4826)
        >>> metrics.extremes("elapsed_ms")
        ((99.0, 2), (150.0, 4))
    """

    def __init__(self, columns: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
        self._columns = dict(zip(METRICS, columns, strict=True))
        self._ranks = ranks

    def values(self, metric: str) -> Sequence[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Metrics`."""
        return self._columns[metric]

    def extremes(self, metric: str) -> Extremes:
        """See :class:`mcore.observe.straggler.rank_numbers.Metrics`."""
        return extremes_of(self._columns[metric], self._ranks)

    def center_and_spread(self, metric: str, side: int, min_z: float) -> tuple[float, float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Metrics`."""
        known = [value for value in self._columns[metric] if math.isfinite(value)]
        if not known:
            return math.nan, 0.0
        center = statistics.median(known)
        return center, robust_spread(
            center, statistics.median([abs(value - center) for value in known])
        )


class ListedMedians:
    """Medians of few ranks.

    Args:
        by_section: One sequence of all ranks for each section; 0 and below count as no data.

    Example:
        >>> ListedMedians([[10.0, 16.0, 0.0]]).relative(0)
        [1.0, 0.625, nan]
    """

    def __init__(self, by_section: Sequence[Sequence[float]]) -> None:
        self._by_section = [
            [median if median > 0 else math.nan for median in of_section]
            for of_section in by_section
        ]

    def of_section(self, section: int) -> list[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        return self._by_section[section]

    def best_of(self, other: ListedMedians) -> ListedMedians:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        pairs = zip(self._by_section, other._by_section, strict=True)
        return ListedMedians([list(map(_smaller, *of_section)) for of_section in pairs])

    def relative(self, section: int) -> list[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        medians = self._by_section[section]
        fastest = min((median for median in medians if median > 0), default=math.nan)
        return [fastest / median for median in medians]

    def individual(self, best: ListedMedians, section: int) -> list[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        return list(map(truediv, best._by_section[section], self._by_section[section]))


def _smaller(one: float, other: float) -> float:
    return one if one <= other or math.isnan(other) else other
