"""Ranks that stand out, in one report or in several in a row.

Times are compared as logarithms, divided by 0.05: a difference of 1 is the 5 % of noise that every
rank is granted. A rank is compared with the faster half of the others, so half of all ranks may be
slow. All functions avoid loops over the ranks.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
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
from mcore.parallel.shortened import shorten

NUM_REPORTS = 3  # that a verdict covers
_FEWEST_REPORTS = 2
_NUM_EARLIER = 8  # reports before them, which are the past of a rank
_NUM_KEPT = (16, 64)  # reports for measuring the noise: at least, at most
_NUM_MEDIANS = 16  # reports for the individual score
_NUM_SAMPLED = 1024  # ranks for measuring the noise
_MAX_LINES = 16

_TIME_NOISE = 0.05  # relative
_LEAST_CHANGE = 2.0  # in units of the noise granted: below it no time has changed
_LEAST_EXCESS_MS = 0.05  # a smaller difference of times is of no interest
_LEAST_EXCESS_SHARE = 0.05  # nor is a smaller share of an iteration
_PRIOR_WEIGHT = 32  # the noise granted counts as much as this number of differences
# Of normal values, 90 % are within 1.645 standard deviations of their mean.
_HEEDED, _HEEDED_SIGMAS = 0.9, 1.645

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


@dataclass(frozen=True)
class OutlierRule:
    """The thresholds beyond which a rank stands out."""

    z: float = 3.3  # for a whole report: raised with the number of ranks and sections
    relative: float = 1.0  # the relative score has to be below it, too
    individual: float = 0.75  # the same for the individual score


class PastReports:
    """The judged values of the last reports, oldest first, and the medians of all sections.

    Judged values are ``[num_rows, world]``, high values being bad, in units of the noise granted.
    NaN means unknown. The first row is the time of an iteration. The first ``num_times`` rows are
    times, and ``row_names`` has the metric or section of each row.
    """

    def __init__(self, section_names: Sequence[str]) -> None:
        sections = list(range(COMPUTE_KIND + 1, len(section_names)))
        columns = list(METRICS)
        self.row_names = ("elapsed_ms", *section_names[1:], "clock_mhz", *_TELEMETRY)
        self.num_times = 1 + len(sections)
        self._columns = torch.tensor(
            [ELAPSED]
            + [SECTIONS_START + STATS_PER_SECTION * kind + 1 for kind in sections]
            + [ELAPSED + columns.index(name) for name in ("clock_mhz", *_TELEMETRY)]
        )
        # A negative noise turns the sign of a metric if its low values are bad.
        noises = [_TIME_NOISE] * self.num_times + [-_TIME_NOISE]
        noises += [-noise if is_low_bad else noise for noise, is_low_bad in _TELEMETRY.values()]
        self._per_noise = torch.tensor(noises, dtype=torch.float64).reciprocal_().unsqueeze(1)
        self._values: deque[torch.Tensor] = deque()
        self._medians: deque[torch.Tensor] = deque(maxlen=_NUM_MEDIANS)

    def add(
        self, rows: GatheredRows, medians: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Add a report and its medians ``[num_sections, world]``.

        Returns the judged values of all reports that are kept, and the best medians of the last 16.
        """
        values = rows.matrix[:, self._columns].t().contiguous()
        if rows.log_interval > 1:
            values[1 : self.num_times] /= rows.log_interval
        # Times, and the clock in the row after them: all are compared as ratios.
        values[: self.num_times + 1].log_()
        values *= self._per_noise
        self._values.append(values.where(values.isfinite(), torch.nan).float())
        fewest, most = _NUM_KEPT
        # Many ranks need fewer reports for the same number of differences, and less memory.
        while len(self._values) > max(fewest, min(most, 4096 // len(rows.ranks))):
            self._values.popleft()
        self._medians.append(medians)
        return tuple(self._values), functools.reduce(torch.fmin, self._medians)


_Distances: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # indices of ranks, and their z


def find_outliers(
    history: Sequence[torch.Tensor], num_times: int, rule: OutlierRule, *, num_reports: int
) -> list[tuple[int, int, float]]:
    """Find row, index of the rank and ``z`` of all values that stand out, the worst first.

    ``history`` is from :meth:`PastReports.add`. A single report is judged alone. Of
    several, the mean has to stand out, and not because of one report. A rank may then also stand
    out from its past.
    """
    recent = history[-num_reports:]
    if num_reports > 1 and len(recent) < _FEWEST_REPORTS:
        return []
    mean = functools.reduce(torch.add, recent) / len(recent)
    num_judged = int((mean.isfinite().sum(dim=1) > 0).sum())
    world = mean.shape[1]
    limits = _compute_limits(num_judged - 1, world, rule.z)
    # For speed: most rows have no extremes far enough apart, and are skipped.
    may_differ = _may_exceed(mean, limits[0] / math.sqrt(len(recent)))
    may_have_changed = [False] * num_times
    earlier = history[-num_reports - _NUM_EARLIER : -num_reports] if num_reports > 1 else ()
    if len(earlier) == _NUM_EARLIER:
        change = mean[:num_times] - sum(values[:num_times] for values in earlier) / _NUM_EARLIER
        may_have_changed = _may_exceed(change, _LEAST_CHANGE, is_alone=world == 1)
    z_by_place: dict[tuple[int, int], float] = {}

    def add(row: int, index: torch.Tensor, z: torch.Tensor) -> None:
        places = ((row, at) for at in index.tolist())
        z_by_place.update(zip(places, z.tolist(), strict=True))

    for row, limit in enumerate(limits[:1] + limits[1:] * (len(mean) - 1)):
        is_time = row < num_times
        has_changed = is_time and may_have_changed[row]
        if not (may_differ[row] or has_changed):
            continue
        past = torch.stack([values[row] for values in history])
        if has_changed:
            index, z = _find_slower_than_before(past, len(recent), limit, rule.individual)
            usual = past[-_NUM_EARLIER - len(recent) : -len(recent), index].median(dim=0).values
            is_felt = _is_felt(mean[row, index], usual, mean[0])
            add(row, index[is_felt], z[is_felt])
        # The distance from the other ranks replaces that from the rank's past.
        if may_differ[row]:
            least = -math.log(rule.relative) / _TIME_NOISE if is_time else 0.0
            index, z = _find_worse_than_others(past, len(recent), limit, least)
            if is_time:
                is_felt = _is_felt(mean[row, index], _compute_quartile(mean[row]), mean[0])
                index, z = index[is_felt], z[is_felt]
            add(row, index, z)
    ordered = sorted(z_by_place.items(), key=lambda item: (-item[1], item[0]))
    return [(row, index, z) for (row, index), z in ordered]


def _may_exceed(values: torch.Tensor, least: float, *, is_alone: bool = False) -> list[bool]:
    """Return for each row whether its extremes are at least ``least`` apart."""
    highest = values.nan_to_num(-torch.inf, -torch.inf, -torch.inf).amax(dim=1)
    if is_alone:
        return (highest >= least).tolist()
    lowest = values.nan_to_num(torch.inf, torch.inf, torch.inf).amin(dim=1)
    return (highest - lowest >= least).tolist()


@functools.lru_cache(maxsize=64)
def _compute_limits(num_others: int, world: int, z: float) -> tuple[float, float]:
    """Return the z for the first row and for each other row.

    The chance that any of ``world`` equal ranks is beyond the first limit is the chance that one
    normal value is beyond ``z``. The same holds for all other rows together and the second limit.
    This is Bonferroni's correction: each test gets the chance divided by the number of tests.
    """
    normal = NormalDist()
    chance = max(math.erfc(z / math.sqrt(2)) / 2 / world, 1e-300)
    return -normal.inv_cdf(chance), -normal.inv_cdf(chance / max(num_others, 1))


def _find_worse_than_others(
    past: torch.Tensor, num_reports: int, z: float, least: float
) -> _Distances:
    """Find the ranks that are worse than the better half of the others.

    ``past`` is ``[num_kept, world]``. The last ``num_reports`` are judged.
    """
    recent = past[-num_reports:]
    mean = recent.mean(dim=0)
    num_known = int(mean.isfinite().sum())
    num_good = num_known // 2
    if num_good == 0:
        return torch.empty(0, dtype=torch.long), torch.empty(0)
    good = mean.argsort()[:num_good]  # NaN is sorted to the end
    sigma = _measure_noise(past, num_reports)
    # The variance of a rank's distance from a mean of num_good ranks: sigma^2 + sigma^2 / num_good.
    spread = sigma * math.sqrt(1 + 1 / num_good)
    # The good ranks were selected for being fast: an equal rank is slower by the expected lead.
    limit = max(least, sigma * _compute_expected_lead(num_known - 1, num_good) + z * spread)
    leads = recent - recent[:, good].mean(dim=1, keepdim=True)
    return _select_lasting(leads, limit, spread)


def _find_slower_than_before(
    past: torch.Tensor, num_reports: int, z: float, score: float
) -> _Distances:
    """Find the ranks that have become slower while the median rank has not.

    ``past`` is ``[num_kept, world]``. The last reports are compared with the eight before them.
    """
    window = past[-num_reports - _NUM_EARLIER :]
    if past.shape[1] > 1:
        window = window - window.nanmedian(dim=1, keepdim=True).values
    recent, earlier = window[_NUM_EARLIER:], window[:_NUM_EARLIER]
    # The noise is that of a mean of num_reports, so a single report has num_reports times its
    # variance. The median of n normal values has pi / 2 / n times the variance of a value.
    spread = _measure_noise(past, num_reports) * math.sqrt(
        1 + num_reports * math.pi / 2 / _NUM_EARLIER
    )
    limit = max(z * spread, -math.log(score) / _TIME_NOISE)
    return _select_lasting(recent - earlier.median(dim=0).values, limit, spread)


def _select_lasting(leads: torch.Tensor, limit: float, spread: float) -> _Distances:
    """Return the ranks with a mean lead over the reports that reaches a limit.

    The worst report counts as at most half the limit worse than the second worst: a single bad
    report is a hiccup.
    """
    if len(leads) > 1:
        second = leads.sort(dim=0).values[-2]
        leads = leads.minimum(second + limit / 2)
    distance = leads.mean(dim=0)
    index = (distance >= limit).nonzero().flatten()
    return index, distance[index].double() / spread


def _measure_noise(past: torch.Tensor, num_reports: int) -> float:
    """Return the standard deviation of a rank's mean over ``num_reports``, from earlier reports.

    ``past`` is ``[num_kept, world]``. Changes that all ranks share are not noise. The larger of two
    measurements counts: from single reports, and from means of several, because a busy machine
    delays a rank for longer than one report.
    """
    granted = 1 / math.sqrt(num_reports)
    world = past.shape[1]
    earlier = past[:-num_reports, :: max(1, world // _NUM_SAMPLED)]
    if world < 2 or len(earlier) < 2:
        return granted
    earlier = earlier - earlier.nanmean(dim=1, keepdim=True)
    measured = [_compute_deviation(earlier[1:] - earlier[:-1], world) * granted]
    if len(earlier) >= 4 * num_reports > 4:
        means = earlier.unfold(0, num_reports, 1).mean(dim=-1)
        # Means that share no report.
        measured.append(_compute_deviation(means[num_reports:] - means[:-num_reports], world))
    weight = (len(earlier) - 1) * (min(world, _NUM_SAMPLED) - 1)
    # Variances pooled by their weights (degrees of freedom), the noise granted being the prior:
    # few reports of few ranks change little.
    square = _PRIOR_WEIGHT * granted**2 + weight * max(measured) ** 2
    return max(granted, math.sqrt(square / (_PRIOR_WEIGHT + weight)))


def _compute_deviation(steps: torch.Tensor, world: int) -> float:
    """Return the standard deviation of values from their differences ``[num, world]``.

    The largest tenth of the differences is ignored. Ranks that become slow do not count then, the
    bursts of a busy machine still do.
    """
    known = steps[steps.isfinite()].abs()
    if len(known) == 0:
        return 0.0
    within = known.kthvalue(1 + int(_HEEDED * (len(known) - 1))).values.item()
    # A difference has twice the variance. Subtracting the mean of the ranks took 1 / world of it.
    return within / _HEEDED_SIGMAS / math.sqrt(2 * (1 - 1 / world))


@functools.lru_cache(maxsize=64)
def _compute_expected_lead(num_others: int, num_fast: int) -> float:
    """Return how far the mean of the fastest of some equal ranks is below that of all, in sigmas.

    The k-th smallest of n normal values is expected at the quantile (k - 0.375) / (n + 0.25)
    (G. Blom, Statistical Estimates and Transformed Beta Variables, 1958).
    """
    normal = NormalDist()
    num = min(num_fast, num_others)
    if num_others > 512:  # the mean of half a normal distribution
        return math.sqrt(2 / math.pi)
    scores = (normal.inv_cdf((k - 0.375) / (num_others + 0.25)) for k in range(1, num + 1))
    return max(0.0, -fmean(scores))


def _is_felt(values: torch.Tensor, usual: torch.Tensor, iterations: torch.Tensor) -> torch.Tensor:
    """Return whether the excess of times over usual ones is a noticeable part of an iteration."""
    if not len(values):
        return values > 0
    iteration_ms = _convert_to_ms(_compute_quartile(iterations)).item()
    least_ms = max(_LEAST_EXCESS_MS, _LEAST_EXCESS_SHARE * iteration_ms)
    # Not ">=": if the time of an iteration is unknown, any excess counts.
    return ~(_convert_to_ms(values) - _convert_to_ms(usual) < least_ms)


def _convert_to_ms(values: torch.Tensor) -> torch.Tensor:
    return (values.double() * _TIME_NOISE).exp()


def _compute_quartile(values: torch.Tensor) -> torch.Tensor:
    return values.nanquantile(0.25, interpolation="lower")


# The smallest and the largest value, each with the first index that has it.
Extremes: TypeAlias = "tuple[tuple[float, int], tuple[float, int]]"
_NO_EXTREMES: Extremes = ((math.nan, -1), (math.nan, -1))


def row_medians(rows: torch.Tensor) -> list[float]:
    """Return the median of the finite values of each row: of two middle values, their mean."""
    num_known = [rows.shape[1]] * len(rows)
    if not _is_finite(rows):
        is_finite = rows.isfinite()
        rows, num_known = rows.where(is_finite, torch.nan), is_finite.sum(dim=1).tolist()
    # The lower of two. With dim= torch would also find its index, which takes 50 % longer.
    lower = torch.stack([row.nanmedian() for row in rows])
    is_above = rows > lower.unsqueeze(1)
    upper = rows.where(is_above, torch.inf).amin(dim=1)
    numbers = zip(
        lower.tolist(), upper.tolist(), is_above.sum(dim=1).tolist(), num_known, strict=True
    )
    return [
        (low + high) / 2 if 2 * num_above == known else low
        for low, high, num_above, known in numbers
    ]


def row_extremes(rows: torch.Tensor) -> list[Extremes]:
    """Return the extremes of the finite values of each row. NaN and -1 if there are none."""
    low = high = rows
    if not _is_finite(rows):
        is_finite = rows.isfinite()
        low, high = rows.where(is_finite, torch.inf), rows.where(is_finite, -torch.inf)
    # Of equal values min and max return the first.
    ends = zip(*(part.tolist() for part in (*low.min(dim=1), *high.max(dim=1))), strict=True)
    return [
        ((smallest, first), (largest, last)) if math.isfinite(smallest) else _NO_EXTREMES
        for smallest, first, largest, last in ends
    ]


def relative_scores(medians: torch.Tensor) -> torch.Tensor:
    """Return the fastest rank's median over that of each rank, ``[..., world]``. NaN: no data."""
    return medians.nan_to_num(torch.inf, torch.inf).amin(dim=-1, keepdim=True) / medians


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, by their sum: much cheaper than checking each value.

    A sum that overflows returns False, which only costs time.
    """
    return math.isfinite(values.sum().item())
