"""Which ranks stand out, and by which metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore.observe.straggler.column_statistics import finite_part, least_spread, median, spread_of
from mcore.observe.straggler.rows import METRICS
from mcore.observe.straggler.scores import relative_scores

__all__ = ["MIN_WORLD_FOR_Z", "Outlier", "OutlierRule", "outlier_lines", "outliers_of"]

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


def outliers_of(
    columns: torch.Tensor,
    medians: torch.Tensor,
    best_medians: torch.Tensor,
    *,
    names: Sequence[str],
    ranks: Sequence[int],
    hosts: Sequence[str],
    rule: OutlierRule,
) -> tuple[Outlier, ...]:
    """Find the ranks that stand out, the worst first.

    Args:
        columns: ``[7, world]`` in the order of ``METRICS``.
        medians: Median range times in ms, ``[len(names), world]``, ``"compute"`` first.
        best_medians: The best that each rank ever had, the same shape.
        names: Of the sections in ``medians``.
        ranks: The rank of each column.
        hosts: Its host.
        rule: The thresholds.

    Returns:
        One for each rank and metric that stands out.
    """
    if len(ranks) >= MIN_WORLD_FOR_Z:
        found = _by_z(columns, medians, rule)
    else:
        found = _by_score(medians, best_medians, names, rule)
    return tuple(
        Outlier(metric, ranks[index], hosts[index], value, center, z, score)
        for metric, index, value, center, z, score in found
    )


_Finding = tuple[str, int, float, float, float, float]


def _by_z(columns: torch.Tensor, medians: torch.Tensor, rule: OutlierRule) -> list[_Finding]:
    found: list[_Finding] = []
    for metric, values in zip(METRICS, columns, strict=True):
        side = _BAD_SIDE.get(metric)
        if side is None:
            continue
        center, spread = _center_and_spread(finite_part(values), side, rule.z)
        if not spread > 0:
            continue
        scores = relative_scores(medians[:1])[0]
        stands_out = (side * (values - center) / spread >= rule.z) & values.isfinite()
        for index in stands_out.nonzero().flatten().tolist():
            value, score = float(values[index]), float(scores[index])
            found.append((metric, index, value, center, (value - center) / spread, score))
    return sorted(found, key=lambda finding: (-abs(finding[4]), finding[1]))


def _center_and_spread(finite: torch.Tensor, side: int, min_z: float) -> tuple[float, float]:
    """Return the median and the spread, which is 0 where nothing stands out.

    With thousands of ranks the medians are what costs, so the second one is only taken if the
    worst value would stand out of the smallest spread that there can be.
    """
    if not finite.numel():
        return math.nan, 0.0
    center = median(finite)
    worst = (finite.amax() if side > 0 else finite.amin()).item()
    distance = side * (worst - center)
    if distance < min_z * least_spread(center):
        return center, 0.0
    spread = spread_of(finite, center)
    return center, spread if distance >= min_z * spread else 0.0


def _by_score(
    medians: torch.Tensor, best_medians: torch.Tensor, names: Sequence[str], rule: OutlierRule
) -> list[_Finding]:
    relative, individual = relative_scores(medians), best_medians / medians
    stands_out = (relative < rule.relative) | (individual < rule.individual)
    found: list[_Finding] = []
    for section, index in stands_out.nonzero().tolist():
        values = medians[section]
        center = median(finite_part(values))
        score = float(torch.minimum(relative[section, index], individual[section, index]))
        found.append((names[section], index, float(values[index]), center, math.nan, score))
    return sorted(found, key=lambda finding: (finding[5], finding[1]))


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
