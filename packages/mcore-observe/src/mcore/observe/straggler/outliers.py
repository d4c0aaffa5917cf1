"""Which ranks stand out, and by which metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mcore.observe.straggler.rank_numbers import Metrics
from mcore.observe.straggler.rows import METRICS

__all__ = [
    "MIN_WORLD_FOR_Z",
    "Outlier",
    "OutlierRule",
    "outlier_lines",
    "outliers_by_score",
    "outliers_by_z",
]

MIN_WORLD_FOR_Z = 4  # below it a median says too little, and the scores decide
_MAX_LINES = 16

# Metric -> the side that is bad: +1 for high values.
_BAD_SIDE = {"elapsed_ms": 1, "data_ms": 1, "temp_c": 1, "util_pct": -1, "clock_mhz": -1}


@dataclass(frozen=True)
class Outlier:
    """A rank that differs from the others, to its disadvantage.

    Attributes:
        metric: A key of ``StragglerReport.metrics``; with fewer than four ranks ``"compute"`` or
            the name of a section.
        rank: The rank given to ``configure``.
        host: Its host name.
        value: Its value, in the unit of the metric; ms of the median range for sections.
        median: The median over the ranks.
        z: Distance from the median in robust spreads, negative below it; NaN with fewer than four
            ranks.
        score: The rank's relative score for ``"compute"``; with fewer than four ranks the worse
            one of relative and individual score of that section.

    Example:
        >>> Outlier("elapsed_ms", 3, "node1", value=15.0, median=10.0, z=33.7, score=0.66).rank
        3
    """

    metric: str
    rank: int
    host: str
    value: float
    median: float
    z: float
    score: float


@dataclass(frozen=True)
class OutlierRule:
    """From where on a rank stands out.

    Attributes:
        z: Robust z on the bad side, four ranks or more.
        relative: Relative score, fewer ranks.
        individual: Individual score, fewer ranks.
    """

    z: float = 3.5
    relative: float = 0.75
    individual: float = 0.75


def outliers_by_z(
    metrics: Metrics,
    compute_scores: Callable[[], Sequence[float]],
    *,
    ranks: Sequence[int],
    hosts: Sequence[str],
    min_z: float,
) -> tuple[Outlier, ...]:
    """Find the ranks whose metrics stand out from those of four ranks or more, the worst first.

    Args:
        metrics: Of all ranks.
        compute_scores: Returns the relative score of each rank; called if one stands out.
        ranks: The rank of each value.
        hosts: Its host.
        min_z: Robust z on the bad side from which a value stands out.

    Returns:
        One for each rank and metric that stands out.
    """
    found: list[tuple[str, int, float, float, float]] = []
    for metric, side in _BAD_SIDE.items():
        center, spread = metrics.center_and_spread(metric, side, min_z)
        if spread > 0:
            found += (
                (metric, index, value, center, (value - center) / spread)
                for index, value in enumerate(metrics.values(metric))
                if side * (value - center) / spread >= min_z and math.isfinite(value)
            )
    if not found:
        return ()
    found.sort(key=lambda one: (-abs(one[4]), one[1]))
    scores = compute_scores()
    return tuple(
        Outlier(metric, ranks[index], hosts[index], value, center, z, scores[index])
        for metric, index, value, center, z in found
    )


def outliers_by_score(
    sections: Iterable[tuple[str, Sequence[float], Sequence[float], Sequence[float]]],
    *,
    ranks: Sequence[int],
    hosts: Sequence[str],
    rule: OutlierRule,
) -> tuple[Outlier, ...]:
    """Find the ranks whose scores are too low, the worst first.

    Args:
        sections: Name, and by rank the medians in ms, the relative and the individual scores.
        ranks: The rank of each value.
        hosts: Its host.
        rule: The thresholds.

    Returns:
        One for each rank and section that stands out.
    """
    found: list[tuple[str, int, float, float, float]] = []
    for name, medians, *both in sections:
        for index, (relative, individual) in enumerate(zip(*both, strict=True)):
            if relative < rule.relative or individual < rule.individual:
                center = statistics.median(value for value in medians if math.isfinite(value))
                found.append((name, index, medians[index], center, min(relative, individual)))
    found.sort(key=lambda one: (one[4], one[1]))
    return tuple(
        Outlier(name, ranks[index], hosts[index], value, center, math.nan, score)
        for name, index, value, center, score in found
    )


def outlier_lines(outliers: Sequence[Outlier]) -> list[str]:
    """Format outliers for a log: at most 16, then how many more there are.

    Example:
        >>> for line in outlier_lines([Outlier("temp_c", 2, "n1", 90.0, 60.0, 50.0, 0.8)]):
        ...     print(line)
        straggler: rank 2 (host n1) temp_c=90.00C median=60.00C z=50.0 score=0.80
    """
    lines = [_line(outlier) for outlier in outliers[:_MAX_LINES]]
    if len(outliers) > _MAX_LINES:
        lines.append(f"\u2026 and {len(outliers) - _MAX_LINES} more")
    return lines


def _line(outlier: Outlier) -> str:
    unit = METRICS.get(outlier.metric, "ms")
    return (
        f"straggler: rank {outlier.rank} (host {outlier.host}) "
        f"{outlier.metric}={outlier.value:.2f}{unit} median={outlier.median:.2f}{unit} "
        f"z={outlier.z:.1f} score={outlier.score:.2f}"
    )
