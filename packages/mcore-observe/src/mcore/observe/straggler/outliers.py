"""Ranks that stand out: in one report, and in several on end.

Times are compared as logarithms, in units of the noise that every rank is granted, 5 %. A rank is
held against the faster half of the others, so that half of all ranks may be slow.
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

NUM_REPORTS = 3  # that a verdict looks at
_FEWEST_REPORTS = 2
_NUM_EARLIER = 8  # reports before them that a rank is compared with itself
_NUM_KEPT = (16, 64)  # reports that the noise is measured over: at least, at most
_NUM_SAMPLED = 1024  # ranks that the noise is measured on
_MAX_LINES = 16

_TIME_NOISE = 0.05  # relative
_LEAST_CHANGE = 2.0  # noises, below which no time has changed
_LEAST_EXCESS_MS = 0.05  # a time that differs by less matters to nobody
_LEAST_EXCESS_SHARE = 0.05  # nor by less than this share of an iteration
_PRIOR_WEIGHT = 32  # differences that the noise granted counts as much as
_HEEDED, _HEEDED_SIGMAS = 0.9, 1.645

# What GPUs tell about themselves, high being bad: the noise granted, low values being bad.
_TELEMETRY = {"temp_c": (3.0, False), "util_pct": (10.0, True)}


@dataclass(frozen=True)
class Outlier:
    """A rank that differs from the others, or from its past, to its disadvantage.

    Attributes:
        metric: ``"elapsed_ms"``, ``"temp_c"``, ``"util_pct"``, ``"clock_mhz"``, ``"data"`` or the
            name of a section.
        rank: The rank given to ``configure``.
        host: Its host name.
        value: Its value in the last report, in the unit of the metric; ms per iteration for
            sections.
        median: The median over the ranks.
        z: Distance from the faster half of the other ranks in standard deviations; from its own
            past where that is what it differs from.
        score: The smaller of the rank's relative and individual score: of the section, and of
            ``"compute"`` for other metrics.
        device: The device that it computes on; empty where not known.

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


@dataclass(frozen=True)
class OutlierRule:
    """The thresholds beyond which a rank stands out."""

    z: float = 3.3  # for a whole report: raised with the number of ranks and sections
    relative: float = 1.0  # relative score below which it has to be as well
    individual: float = 0.75  # the same for the individual score


class Judged:
    """What is judged of a report, and its values over the last reports, oldest first.

    The values are ``[num_rows, world]``, bad when high, in units of the noise granted; NaN where
    not known. The first row is the time of an iteration.
    """

    def __init__(self, section_names: Sequence[str]) -> None:
        sections = list(range(COMPUTE_KIND + 1, len(section_names)))
        columns = list(METRICS)
        self.names = ("elapsed_ms", *section_names[1:], "clock_mhz", *_TELEMETRY)
        self.num_times = 1 + len(sections)
        self._columns = torch.tensor(
            [ELAPSED]
            + [SECTIONS_START + STATS_PER_SECTION * kind + 1 for kind in sections]
            + [ELAPSED + columns.index(name) for name in ("clock_mhz", *_TELEMETRY)]
        )
        noises = [_TIME_NOISE] * self.num_times + [-_TIME_NOISE]
        noises += [-noise if is_low_bad else noise for noise, is_low_bad in _TELEMETRY.values()]
        self._per_noise = torch.tensor(noises, dtype=torch.float64).reciprocal_().unsqueeze(1)
        self._kept: deque[torch.Tensor] = deque()

    def add(self, rows: GatheredRows) -> tuple[torch.Tensor, ...]:
        """Take a report in, and return the values of all that are kept."""
        values = rows.matrix[:, self._columns].t().contiguous()
        if rows.log_interval > 1:
            values[1 : self.num_times] /= rows.log_interval
        values[: self.num_times + 1].log_()
        values *= self._per_noise
        self._kept.append(values.where(values.isfinite(), torch.nan).float())
        fewest, most = _NUM_KEPT
        while len(self._kept) > max(fewest, min(most, 4096 // len(rows.ranks))):
            self._kept.popleft()
        return tuple(self._kept)


@dataclass(frozen=True)
class Found:
    """A rank that stands out, by number of the row and of the rank; ``z`` as in ``Outlier``."""

    row: int
    index: int
    z: float


_Distances: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # indices of ranks, and their z
_NOBODY: _Distances = (torch.empty(0, dtype=torch.long), torch.empty(0))


def find_outliers(
    history: Sequence[torch.Tensor], num_times: int, rule: OutlierRule, *, num_reports: int
) -> list[Found]:
    """Find the ranks that stand out over the last reports, the worst first.

    ``history`` has ``[num_rows, world]`` for each report, times in the first ``num_times`` rows.
    For one report, that alone counts. For several, their mean has to stand out, not one report
    alone; a rank may then stand out from its own past, too.
    """
    recent = history[-num_reports:]
    if num_reports > 1 and len(recent) < _FEWEST_REPORTS:
        return []
    mean = functools.reduce(torch.add, recent) / len(recent)
    judged = (mean.isfinite().sum(dim=1) > 0).tolist()
    world = mean.shape[1]
    limits = _limits(sum(judged) - 1, world, rule.z)
    may_differ = _rooms(mean, limits[0] / math.sqrt(len(recent)))
    may_have_changed = [False] * num_times
    earlier = history[-num_reports - _NUM_EARLIER : -num_reports] if num_reports > 1 else ()
    if len(earlier) == _NUM_EARLIER:
        change = mean[:num_times] - sum(values[:num_times] for values in earlier) / _NUM_EARLIER
        may_have_changed = _rooms(change, _LEAST_CHANGE, alone=world == 1)
    found: dict[tuple[int, int], float] = {}
    for row, limit in enumerate(limits[:1] + limits[1:] * (len(judged) - 1)):
        is_time = row < num_times
        has_changed = is_time and may_have_changed[row]
        if not (may_differ[row] or has_changed):
            continue
        past = torch.stack([values[row] for values in history])
        if has_changed:
            index, z = _slower_than_before(past, len(recent), limit, rule.individual)
            usual = past[-_NUM_EARLIER - len(recent) : -len(recent), index].median(dim=0).values
            is_felt = _is_felt(mean[row, index], usual, mean[0])
            _note(found, row, (index[is_felt], z[is_felt]))
        if may_differ[row]:
            least = -math.log(rule.relative) / _TIME_NOISE if is_time else 0.0
            index, z = _worse_than_others(past, len(recent), limit, least)
            if is_time:
                is_felt = _is_felt(mean[row, index], _quartile(mean[row]), mean[0])
                index, z = index[is_felt], z[is_felt]
            _note(found, row, (index, z))
    ordered = sorted(found.items(), key=lambda one: (-one[1], one[0]))
    return [Found(row, index, z) for (row, index), z in ordered]


def _note(found: dict[tuple[int, int], float], row: int, distances: _Distances) -> None:
    indices, z = (values.tolist() for values in distances)
    found.update(zip(((row, index) for index in indices), z, strict=True))


def _rooms(values: torch.Tensor, least: float, *, alone: bool = False) -> list[bool]:
    """Return for each row whether its extremes are far enough apart for anyone to stand out."""
    highest = values.nan_to_num(-torch.inf, -torch.inf, -torch.inf).amax(dim=1)
    if alone:
        return (highest >= least).tolist()
    lowest = values.nan_to_num(torch.inf, torch.inf, torch.inf).amin(dim=1)
    return (highest - lowest >= least).tolist()


@functools.lru_cache(maxsize=64)
def _limits(num_others: int, world: int, z: float) -> tuple[float, float]:
    """Return the z for the first row and for each other one.

    By chance, one of all ranks is beyond the first as rarely as one value is beyond ``z``, and one
    of all ranks and other rows is beyond the second as rarely (Bonferroni).
    """
    normal = NormalDist()
    chance = max(math.erfc(z / math.sqrt(2)) / 2 / world, 1e-300)
    return -normal.inv_cdf(chance), -normal.inv_cdf(chance / max(num_others, 1))


def _worse_than_others(past: torch.Tensor, num_reports: int, z: float, least: float) -> _Distances:
    """Return index and z of the ranks that are worse than the better half of the others.

    ``past`` is ``[num_kept, world]``, of which the last ``num_reports`` are judged.
    """
    recent = past[-num_reports:]
    mean = recent.mean(dim=0)
    num_known = int(mean.isfinite().sum())
    num_good = num_known // 2
    if num_good == 0:
        return _NOBODY
    good = mean.argsort()[:num_good]  # NaN comes last
    sigma = _noise(past, num_reports)
    spread = sigma * math.sqrt(1 + 1 / num_good)
    limit = max(least, sigma * _expected_lead(num_known - 1, num_good) + z * spread)
    leads = recent - recent[:, good].mean(dim=1, keepdim=True)
    return _lasting(leads, limit, spread)


def _slower_than_before(past: torch.Tensor, num_reports: int, z: float, score: float) -> _Distances:
    """Return index and z of the ranks that have become slower, and not with all others.

    ``past`` is ``[num_kept, world]``. A rank's past is the eight reports before the last ones.
    """
    window = past[-num_reports - _NUM_EARLIER :]
    if past.shape[1] > 1:
        window = window - window.nanmedian(dim=1, keepdim=True).values
    recent, earlier = window[_NUM_EARLIER:], window[:_NUM_EARLIER]
    spread = _noise(past, num_reports) * math.sqrt(1 + num_reports * math.pi / 2 / _NUM_EARLIER)
    limit = max(z * spread, -math.log(score) / _TIME_NOISE)
    return _lasting(recent - earlier.median(dim=0).values, limit, spread)


def _lasting(leads: torch.Tensor, limit: float, spread: float) -> _Distances:
    """Return where the mean over the reports is over a limit.

    The worst report counts as half the limit worse than the second at most: one alone is a hiccup.
    """
    if len(leads) > 1:
        second = leads.sort(dim=0).values[-2]
        leads = leads.minimum(second + limit / 2)
    distance = leads.mean(dim=0)
    index = (distance >= limit).nonzero().flatten()
    return index, distance[index].double() / spread


def _noise(past: torch.Tensor, num_reports: int) -> float:
    """Return the standard deviation of a rank's mean over some reports, by those before them.

    ``past`` is ``[num_kept, world]``. What all ranks have in common is no noise. Single reports and
    means of several are both looked at, since a busy machine holds ranks up for longer than one.
    The noise granted counts as 32 differences, so that few reports of few ranks say little.
    """
    granted = 1 / math.sqrt(num_reports)
    world = past.shape[1]
    earlier = past[:-num_reports, :: max(1, world // _NUM_SAMPLED)]
    if world < 2 or len(earlier) < 2:
        return granted
    earlier = earlier - earlier.nanmean(dim=1, keepdim=True)
    measured = [_spread_of(earlier[1:] - earlier[:-1], world) * granted]
    if len(earlier) >= 4 * num_reports > 4:
        means = earlier.unfold(0, num_reports, 1).mean(dim=-1)
        measured.append(_spread_of(means[num_reports:] - means[:-num_reports], world))
    weight = (len(earlier) - 1) * (min(world, _NUM_SAMPLED) - 1)
    square = _PRIOR_WEIGHT * granted**2 + weight * max(measured) ** 2
    return max(granted, math.sqrt(square / (_PRIOR_WEIGHT + weight)))


def _spread_of(steps: torch.Tensor, world: int) -> float:
    """Return the standard deviation of values whose differences are given, ``[num, world]``.

    Nine in ten of normal values are within 1.645 of it; that one in ten is not heeded lets some
    ranks become slow, and still sees the bursts of a busy machine.
    """
    known = steps[steps.isfinite()].abs()
    if len(known) == 0:
        return 0.0
    within = known.kthvalue(1 + int(_HEEDED * (len(known) - 1))).values.item()
    return within / _HEEDED_SIGMAS / math.sqrt(2 * (1 - 1 / world))


@functools.lru_cache(maxsize=64)
def _expected_lead(num_others: int, num_fast: int) -> float:
    """Return how far the fastest of some equal ranks are below their mean, by chance, in sigmas.

    Order statistics of normal values by Blom's formula (Statistical Estimates and Transformed Beta
    Variables, 1958).
    """
    normal = NormalDist()
    num = min(num_fast, num_others)
    if num_others > 512:  # half of a normal distribution
        return math.sqrt(2 / math.pi)
    scores = (normal.inv_cdf((k - 0.375) / (num_others + 0.25)) for k in range(1, num + 1))
    return max(0.0, -fmean(scores))


def _is_felt(own: torch.Tensor, usual: torch.Tensor, iterations: torch.Tensor) -> torch.Tensor:
    """Return whether what times are longer than usual is a noticeable part of an iteration."""
    if not len(own):
        return own > 0
    least_ms = max(_LEAST_EXCESS_MS, _LEAST_EXCESS_SHARE * _as_ms(_quartile(iterations)).item())
    return ~(_as_ms(own) - _as_ms(usual) < least_ms)


def _as_ms(values: torch.Tensor) -> torch.Tensor:
    return (values.double() * _TIME_NOISE).exp()


def _quartile(values: torch.Tensor) -> torch.Tensor:
    return values.nanquantile(0.25, interpolation="lower")


def outlier_lines(outliers: Sequence[Outlier]) -> list[str]:
    """Return the lines for a log: at most 16, then how many more there are."""
    return shorten(outliers, most=_MAX_LINES, more="\u2026 and {} more")
