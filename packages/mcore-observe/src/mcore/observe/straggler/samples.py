"""How long the ranges of one kind took: aggregates of bounded size."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from mcore.observe.straggler.section_stats import SectionStats

__all__ = ["NUM_KEPT", "Samples"]

NUM_KEPT = 1024  # samples that the median is taken over

_NS_PER_MS = 1e6


class Samples:
    """Count, sum and maximum of durations, and the last 1024 of them for the median.

    Example:
        >>> samples = Samples()
        >>> samples.add([2_000_000, 1_000_000, 6_000_000])
        >>> samples.stats()
        SectionStats(count=3, sum_ms=9.0, median_ms=2.0, max_ms=6.0)
    """

    __slots__ = ("_count", "_last_ns", "_max_ns", "_sum_ns")

    def __init__(self) -> None:
        self._count = 0
        self._sum_ns: float = 0
        self._max_ns: float = 0
        self._last_ns: deque[float] = deque(maxlen=NUM_KEPT)

    def add(self, durations_ns: Sequence[float]) -> None:
        """Take in some durations.

        Args:
            durations_ns: Nanoseconds, oldest first.
        """
        if durations_ns:
            self._count += len(durations_ns)
            self._sum_ns += sum(durations_ns)
            self._max_ns = max(self._max_ns, *durations_ns)
            self._last_ns.extend(durations_ns)

    def stats(self, scale: int = 1) -> SectionStats:
        """Return the aggregates.

        Args:
            scale: What the sum is multiplied by: N where only each Nth range was timed.

        Returns:
            The statistics in milliseconds; median and maximum are NaN where there is no sample.
        """
        if not self._count:
            return SectionStats(0, 0.0, math.nan, math.nan)
        return SectionStats(
            count=self._count,
            sum_ms=self._sum_ns * scale / _NS_PER_MS,
            median_ms=statistics.median(self._last_ns) / _NS_PER_MS,
            max_ms=self._max_ns / _NS_PER_MS,
        )
