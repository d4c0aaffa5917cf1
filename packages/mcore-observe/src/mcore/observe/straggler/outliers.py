"""Ranks that stand out, and the metrics by which they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore.observe.straggler.exchange import METRICS
from mcore.observe.straggler.ranges import DATA_KIND
from mcore.observe.straggler.statistics import Extremes, least_spread, robust_spread, row_medians
from mcore.parallel.shortened import shorten

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
    """The thresholds beyond which a rank stands out."""

    z: float = 3.5  # robust z on the bad side, four ranks or more
    relative: float = 0.75  # relative score, fewer ranks
    individual: float = 0.75  # individual score, fewer ranks


def outliers_by_z(
    metrics: torch.Tensor,
    extremes: Mapping[str, Extremes],
    compute_scores: Callable[[], torch.Tensor],
    *,
    ranks: Sequence[int],
    hosts: Sequence[str],
    min_z: float,
) -> tuple[Outlier, ...]:
    """Find the ranks whose metrics stand out from those of four ranks or more, the worst first.

    ``metrics`` are ``[7, world]``; relative scores are only asked for if a rank stands out. Medians
    are costly, so they are computed only where the extremes leave room for an outlier.
    """
    found: list[tuple[str, int, float, float, float]] = []
    judged = [metric for metric in _BAD_SIDE if _has_room(extremes[metric], min_z)]
    if not judged:
        return ()
    rows = metrics[[list(METRICS).index(metric) for metric in judged]]
    for metric, values, center in zip(judged, rows, row_medians(rows), strict=True):
        side, ((smallest, _), (largest, _)) = _BAD_SIDE[metric], extremes[metric]
        distance = largest - center if side > 0 else center - smallest
        if distance < min_z * least_spread(center):
            continue
        spread = robust_spread(values, center)
        if spread > 0:
            z_of = (values - center) / spread
            indices = ((side * z_of >= min_z) & values.isfinite()).nonzero().flatten()
            found += (
                (metric, index, value, center, z)
                for index, value, z in zip(
                    indices.tolist(), values[indices].tolist(), z_of[indices].tolist(), strict=True
                )
            )
    if not found:
        return ()
    found.sort(key=lambda one: (-abs(one[4]), one[1]))
    scores = compute_scores().tolist()
    return tuple(
        Outlier(metric, ranks[index], hosts[index], value, center, z, scores[index])
        for metric, index, value, center, z in found
    )


def _has_room(extremes: Extremes, min_z: float) -> bool:
    """Return whether one extreme can be ``min_z`` of the smallest spread away from any median."""
    (smallest, _), (largest, _) = extremes
    least_center = 0.0 if smallest < 0 < largest else min(abs(smallest), abs(largest))
    return largest - smallest >= min_z * least_spread(least_center)


def outliers_by_score(
    names: Sequence[str],
    medians: torch.Tensor,
    relative: torch.Tensor,
    individual: torch.Tensor,
    *,
    ranks: Sequence[int],
    hosts: Sequence[str],
    rule: OutlierRule,
) -> tuple[Outlier, ...]:
    """Find the ranks whose scores are too low, the worst first.

    All tensors are ``[num_sections, world]``, with the sections in the order of ``names``. What
    prefetching hides slows nobody down, so data ranges are not judged.
    """
    found: list[tuple[str, int, float, float, float]] = []
    sections = zip(names, medians, relative.tolist(), individual.tolist(), strict=True)
    for kind, (name, values, *scores) in enumerate(sections):
        for index, (of_fastest, of_best) in enumerate(zip(*scores, strict=True)):
            is_low = of_fastest < rule.relative or of_best < rule.individual
            if is_low and kind != DATA_KIND:
                [center] = row_medians(values.unsqueeze(0))
                score = min(of_fastest, of_best)
                found.append((name, index, values[index].item(), center, score))
    found.sort(key=lambda one: (one[4], one[1]))
    return tuple(
        Outlier(name, ranks[index], hosts[index], value, center, math.nan, score)
        for name, index, value, center, score in found
    )


def outlier_lines(outliers: Sequence[Outlier]) -> list[str]:
    """Return the lines for a log: at most 16, then how many more there are."""
    lines = [_line(outlier) for outlier in outliers]
    return shorten(lines, most=_MAX_LINES, more="\u2026 and {} more")


def _line(outlier: Outlier) -> str:
    unit = METRICS.get(outlier.metric, "ms")
    return (
        f"straggler: rank {outlier.rank} (host {outlier.host}) "
        f"{outlier.metric}={outlier.value:.2f}{unit} median={outlier.median:.2f}{unit} "
        f"z={outlier.z:.1f} score={outlier.score:.2f}"
    )
