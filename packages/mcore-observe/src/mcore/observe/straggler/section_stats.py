"""What one rank measured of one section."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SectionStats"]


@dataclass(frozen=True)
class SectionStats:
    """How long the ranges of one section took on one rank.

    Attributes:
        count: Ranges that were timed; with ``sample_every`` N that is one of N entries.
        sum_ms: Their sum in ms, times ``sample_every``.
        median_ms: The median of the last 1024, in ms; NaN where none was timed.
        max_ms: The longest, in ms; NaN where none was timed.

    Example:
        >>> SectionStats(count=2, sum_ms=3.0, median_ms=1.5, max_ms=2.0).sum_ms
        3.0
    """

    count: int
    sum_ms: float
    median_ms: float
    max_ms: float
