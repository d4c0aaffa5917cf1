"""Ranks that stand out in one report. The verdict over several reports is in ``verdict``.

Times are compared as logarithms, divided by 0.05: a difference of 1 is the 5 % of noise that every
rank is granted. A rank is compared with the faster half of all, so half of the ranks may be slow.
Sensors are judged too: they explain a slow rank, but are never a verdict. All functions avoid loops
over the ranks.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import TypeAlias

import torch

from mcore.observe.straggler.exchange import (
    ELAPSED,
    METRICS,
    SECTIONS_START,
    STATS_PER_SECTION,
    GatheredRows,
)
from mcore.observe.straggler.ranges import COMPUTE_KIND
from mcore.observe.straggler.verdict import (
    OutlierRule,
    Verdict,
    compute_chance,
    compute_least_excess,
    expected_place,
    is_finite,
    measure_deviation,
)
from mcore.parallel.shortened import shorten

_NUM_KEPT = 9  # reports for measuring the noise of one
_NUM_MEDIANS = 16  # reports for the individual score
_NUM_SAMPLED = 1024  # ranks for measuring the noise
_MAX_LINES = 16
_TIME_NOISE = 0.05  # relative

# Telemetry that is judged without logarithms: the noise granted, and whether low values are bad.
_TELEMETRY = {"temp_c": (3.0, False), "util_pct": (10.0, True)}


@dataclass(frozen=True)
class Outlier:
    """A rank that is worse than the others, or worse than before.

    Attributes:
        metric: ``"elapsed_ms"``, ``"temp_c"``, ``"util_pct"``, ``"clock_mhz"``, ``"data"`` or the
            name of a section.
        rank: The rank given to ``configure``.
        host: Its host name.
        value: Its value in the last report, in the unit of the metric. For sections: ms per
            iteration.
        median: The median over the ranks.
        z: Distance in standard deviations from the faster half of the other ranks, or from the
            rank's past if it differs from that.
        score: The smaller of the rank's relative and individual score. For sections it is that of
            the section, for other metrics that of ``"compute"``.
        device: The device that the rank computes on. Empty if unknown.

    Example:
        >>> Outlier("elapsed_ms", 3, "node1", value=15.0, median=10.0, z=6.6, score=0.66).rank
        3
    """

    metric: str
    rank: int
    host: str
    value: float
    median: float
    z: float
    score: float
    device: str = ""

    def __str__(self) -> str:
        """Return a line for a log."""
        unit = METRICS.get(self.metric, "ms")
        place = f"{self.host}, {self.device}" if self.device else self.host
        return (
            f"straggler: rank {self.rank} (host {place}) "
            f"{self.metric}={self.value:.2f}{unit} median={self.median:.2f}{unit} "
            f"z={self.z:.1f} score={self.score:.2f}"
        )


def outlier_lines(outliers: Sequence[Outlier]) -> list[str]:
    """Return the lines for a log: at most 16, then the number of further outliers."""
    return shorten(outliers, most=_MAX_LINES, more="\u2026 and {} more")


class PastReports:
    """The reports so far: their noise, the last known times, and the verdicts on each rank.

    Judged values are ``[num_rows, world]``, high values being bad, in units of the noise granted.
    NaN means unknown. The first row is the time of an iteration. The first ``num_times`` rows are
    times, and ``row_names`` has the metric or section of each row. ``peers`` has a label for each
    rank, or is empty: verdicts compare ranks with the same label.
    """

    def __init__(
        self,
        section_names: Sequence[str],
        *,
        rule: OutlierRule | None = None,
        peers: Sequence[str] = (),
    ) -> None:
        sections = list(range(COMPUTE_KIND + 1, len(section_names)))
        columns = list(METRICS)
        self.row_names = ("elapsed_ms", *section_names[1:], "clock_mhz", *_TELEMETRY)
        self.num_times = 1 + len(sections)
        self.rule, self._peers = rule or OutlierRule(), peers
        self._columns = torch.tensor(
            [ELAPSED]
            + [SECTIONS_START + STATS_PER_SECTION * kind + 1 for kind in sections]
            + [ELAPSED + columns.index(name) for name in ("clock_mhz", *_TELEMETRY)]
        )
        # A negative noise turns the sign of a metric if its low values are bad.
        noises = [_TIME_NOISE] * self.num_times + [-_TIME_NOISE]
        noises += [-noise if is_low_bad else noise for noise, is_low_bad in _TELEMETRY.values()]
        self._per_noise = torch.tensor(noises, dtype=torch.float64).reciprocal_().unsqueeze(1)
        self._values: deque[torch.Tensor] = deque(maxlen=_NUM_KEPT)
        self._medians: deque[torch.Tensor] = deque(maxlen=_NUM_MEDIANS)
        self._verdict: Verdict | None = None
        # The last known times [num_times, world] in ms, and the last known medians of all sections.
        self.times = self.last_medians = torch.empty(0)

    def add(self, rows: GatheredRows, medians: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Add a report and its medians ``[num_sections, world]``.

        Returns the medians of the last 16 reports.
        """
        values = rows.matrix[:, self._columns].t().contiguous()
        if rows.log_interval > 1:
            values[1 : self.num_times] /= rows.log_interval
        times = values[: self.num_times].clone()
        is_known = times.isfinite() & (times > 0)
        # Times, and the clock in the row after them: all are compared as ratios.
        values[: self.num_times + 1].log_()
        logarithms = values[: self.num_times].where(is_known, torch.nan).float()
        values *= self._per_noise
        self._values.append(values.where(values.isfinite(), torch.nan).float())
        self._medians.append(medians)
        if self._verdict is None:
            peers = self._peers or ("",) * len(rows.ranks)
            self._verdict = Verdict(self.num_times, peers, self.rule)
            self.times, self.last_medians = times, medians
        self.times = times.where(is_known, self.times)
        self.last_medians = medians.where(medians.isfinite(), self.last_medians)
        self._verdict.add(logarithms)
        return tuple(self._medians)

    @property
    def is_measuring(self) -> bool:
        """Whether there are too few reports for a verdict."""
        return self._verdict is None or self._verdict.is_measuring

    def find_stragglers(self) -> Places:
        """Find the slow ranks, by several reports."""
        return [] if self._verdict is None else _sort_places(self._verdict.found)

    def kept(self) -> tuple[torch.Tensor, ...]:
        """Return the judged values of the last reports, for :func:`find_outliers`."""
        return tuple(self._values)


Places: TypeAlias = list[tuple[int, int, float]]  # row, index of the rank and z, the worst first


def _sort_places(z_by_place: Mapping[tuple[int, int], float]) -> Places:
    ordered = sorted(z_by_place.items(), key=lambda item: (-item[1], item[0]))
    return [(row, index, z) for (row, index), z in ordered]


def find_outliers(kept: Sequence[torch.Tensor], num_times: int, rule: OutlierRule) -> Places:
    """Find the values of the last report that are far from the better half.

    ``kept`` is from :meth:`PastReports.kept`.
    """
    values = kept[-1]
    world = values.shape[1]
    num_judged = int((values.isfinite().sum(dim=1) > 0).sum())
    limits = _compute_limits(num_judged - 1, world, rule.z)
    # For speed: most rows have no extremes far enough apart, and are skipped.
    lowest = values.nan_to_num(torch.inf, torch.inf, torch.inf).amin(dim=1)
    highest = values.nan_to_num(-torch.inf, -torch.inf, -torch.inf).amax(dim=1)
    may_differ = (highest - lowest >= limits[0]).tolist()
    iteration_ms = _convert_to_ms(_compute_quartile(values[0]))
    found: dict[tuple[int, int], float] = {}
    for row, of_rank in enumerate(values):
        num_known = int(of_rank.isfinite().sum())
        num_good = num_known // 2
        if not may_differ[row] or num_good == 0:
            continue
        good = of_rank.argsort()[:num_good]  # NaN is sorted to the end
        leads = of_rank - of_rank[good].mean()
        sigma = _measure_noise([of_report[row] for of_report in kept])
        # The variance of a rank's distance from a mean of num_good ranks.
        spread = sigma * math.sqrt(1 + 1 / num_good)
        # The good ranks were selected for being fast: an equal rank is slower by the expected lead.
        limit = sigma * _compute_expected_lead(num_known - 1, num_good) + limits[row > 0] * spread
        is_worse = leads >= limit
        if row < num_times:
            usual = _compute_quartile(of_rank)
            least = compute_least_excess(_convert_to_ms(usual), iteration_ms)
            least = max(least, -math.log(rule.relative))
            is_worse &= of_rank - usual >= least / _TIME_NOISE
        index = is_worse.nonzero().flatten()
        z = (leads[index].double() / spread).tolist()
        found.update(zip([(row, at) for at in index.tolist()], z, strict=True))
    return _sort_places(found)


@functools.lru_cache(maxsize=64)
def _compute_limits(num_others: int, world: int, z: float) -> tuple[float, float]:
    """Return the z for the first row and for each other row.

    The chance that any of ``world`` equal ranks is beyond the first limit is the chance that one
    normal value is beyond ``z``. The same holds for all other rows together and the second limit.
    This is Bonferroni's correction: each test gets the chance divided by the number of tests.
    """
    normal = NormalDist()
    chance = max(compute_chance(z) / world, 1e-300)
    return -normal.inv_cdf(chance), -normal.inv_cdf(chance / max(num_others, 1))


def _measure_noise(past: Sequence[torch.Tensor]) -> float:
    """Return the standard deviation of a rank, measured in several reports.

    Changes that all ranks share are not noise, nor is the largest tenth of the differences.
    """
    sampled = torch.stack(list(past))[:, :: max(1, len(past[0]) // _NUM_SAMPLED)]
    sampled = sampled - sampled.nanmean(dim=1, keepdim=True)
    return max(1.0, measure_deviation(sampled[1:] - sampled[:-1], 0.9) / math.sqrt(2))


@functools.lru_cache(maxsize=64)
def _compute_expected_lead(num_others: int, num_fast: int) -> float:
    """Return how far the mean of the fastest of some equal ranks is below that of all, in sigmas.

    The k-th smallest of n normal values is expected at the quantile (k - 0.375) / (n + 0.25)
    (G. Blom, Statistical Estimates and Transformed Beta Variables, 1958).
    """
    num = min(num_fast, num_others)
    if num_others > 512:  # the mean of half a normal distribution
        return math.sqrt(2 / math.pi)
    return max(0.0, -fmean(expected_place(k, num_others) for k in range(1, num + 1)))


def _convert_to_ms(value: torch.Tensor) -> float:
    return math.exp(value.item() * _TIME_NOISE)


def _compute_quartile(values: torch.Tensor) -> torch.Tensor:
    return values.nanquantile(0.25, interpolation="lower")


# The smallest and the largest value, each with the first index that has it.
Extremes: TypeAlias = "tuple[tuple[float, int], tuple[float, int]]"
_NO_EXTREMES: Extremes = ((math.nan, -1), (math.nan, -1))


def row_extremes(rows: torch.Tensor) -> list[Extremes]:
    """Return the extremes of the finite values of each row. NaN and -1 if there are none."""
    low = high = rows
    if not is_finite(rows):
        known = rows.isfinite()
        low, high = rows.where(known, torch.inf), rows.where(known, -torch.inf)
    # Of equal values min and max return the first.
    ends = zip(*(part.tolist() for part in (*low.min(dim=1), *high.max(dim=1))), strict=True)
    return [
        ((smallest, first), (largest, last)) if math.isfinite(smallest) else _NO_EXTREMES
        for smallest, first, largest, last in ends
    ]


def relative_scores(medians: torch.Tensor) -> torch.Tensor:
    """Return the fastest rank's median over that of each rank, ``[..., world]``. NaN: no data."""
    return medians.nan_to_num(torch.inf, torch.inf).amin(dim=-1, keepdim=True) / medians
