"""The verdict over several reports: which ranks are slow, and which only vary.

A value is the logarithm of a time, so a difference of 0.05 is 5 %. A rank is compared with the
ranks that do the same work (``peers``), and with its own past. Both tests use its last known
values. All functions avoid loops over the ranks.

Statistic. ``z`` is a rank's value minus the median of its peers in the same report, which removes
everything that all ranks share. ``d`` is ``z`` minus the lower quartile of the peers in the same
report, so half of the ranks may be slow. Expected of equal ranks is a ``d`` of ``bias``, the
distance of the quartile from the middle. A rank is slow if, for one window of 3, 5, 10 or 20
reports, all of the following hold:

- Level: the mean of ``d`` is above ``bias`` plus a multiple of the standard deviation of such a
  mean. This deviation is the largest of three measurements. The first is that of single reports,
  divided by the root of the window. The second is that between windows of the past, which includes
  noise that lasts for several reports. The third is the spread of the faster half of the peers,
  which includes lasting differences of healthy hardware. It needs 16 peers.
- Count: at least 3 of 3, 4 of 5, 8 of 10 or 16 of 20 values of ``d`` are above ``bias`` plus a
  quantile of the measured noise, and above half the mean. The quantile follows from the share of
  noise values above it and the binomial distribution (beta-binomial, because the share is itself
  measured). It needs no normal distribution: neither rare pauses, however long, nor pauses in
  every second report are a verdict.
- Size: the mean is at least 3 % of an iteration.

The noise of a report is a rank's ``z`` minus the median of five values around it, which a lasting
change does not disturb. It is pooled over the ranks.

Correction. ``z_threshold`` sets the chance of a false verdict in a report. It is divided by the
number of ranks, of windows and, for sections, by their number (Bonferroni). Few measurements make
the multiple larger, as with Student's distribution.

Past. Values of the last 3 or 5 reports are compared with the mean of the 15 before them in the same
way, if ``individual_threshold`` is exceeded, by default 0.96 for a rank without peers. This ends
once the slow values are the past.

Memory. 20 values per rank and time, and up to 256 for at most 512 ranks.

It cannot find a rank that was slow for fewer than three reports, or in less than four of five. The
same holds for an excess below 3 % or within the noise, for more than half of the peers, and for a
change of all peers together.

In the first 32 reports a rank has only a few independent values if its noise lasts. With four ranks
or more, the noise then counts as lasting if differences grow by a fifth with the distance in time,
and it is assumed to grow further. With 5 % of noise, of which 90 % remain in the next report, about
4 in 1,000 of the first 24 reports of 8 ranks name a healthy rank, and 20 to 40 of 2 ranks. The
price is that a small change within these reports is sometimes named only after them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, median
from typing import TypeAlias

import torch

_WINDOWS = ((3, 3), (5, 4), (10, 8), (20, 16))  # reports, and how many of them have to be slow
_NUM_RECENT = 20
_PAST_WINDOWS = _WINDOWS[:2]
_NUM_EARLIER = 15
_NUM_NEIGHBOURS = 5
_MANY = 16  # ranks whose spread shows lasting differences
_FEWEST, _FEWEST_OF_FEW, _FEWEST_OF_MANY = 8, {1: 15, 2: 10}, 5  # reports, by number of ranks
_LEAST_MEASUREMENTS = 8  # of noise
_INDIVIDUAL_ALONE = 0.96  # instead of the default
_NUM_SAMPLED, _MOST_MEASURED = 512, 8192  # ranks, and values of them, for the noise
_NUM_MEASURED = (16, 256)  # reports for the noise: at least, at most
_LAGS = (16, 64)
_LEAST_NOISE = 0.001
_SHARES = (0.5, 0.8)  # of the smallest values, for the noise: pauses are rarer
_GROWTH, _GROWTH_AT_START = 1.3, 1.2  # of differences with the distance in time, if noise lasts
_NUM_START = 32  # reports
_LEAST_EXCESS_MS = 0.05  # a smaller difference of times is of no interest
_LEAST_EXCESS_SHARE = 0.03  # nor is a smaller share of an iteration
_FEW = 64  # values
_SCALE = 1.06  # the median of five includes the value itself
_NORMAL = NormalDist()

Found: TypeAlias = "dict[int, float]"  # index of a rank -> distance in standard deviations


@dataclass(frozen=True)
class OutlierRule:
    """The thresholds beyond which a rank is an outlier."""

    z: float = 3.3  # for a whole report: raised with the number of ranks and sections
    relative: float = 1.0  # the relative score has to be below it, too
    individual: float = 0.85  # the same for the individual score


class Verdict:
    """The slow ranks after each report. ``peers`` has a label for each rank.

    ``found`` has the distance in standard deviations by row and index of the rank.
    """

    def __init__(self, num_times: int, peers: Sequence[str], rule: OutlierRule) -> None:
        self.found: dict[tuple[int, int], float] = {}
        labels = {label: place for place, label in enumerate(dict.fromkeys(peers))}
        of_rank = torch.tensor([labels[label] for label in peers])
        self._groups = [(of_rank == place).nonzero().flatten() for place in labels.values()]
        chance = compute_chance(rule.z)
        # The first row gets as large a share as all others together.
        shares = [1, *[max(num_times - 1, 1)] * (num_times - 1)]
        chances = [chance / len(peers) / share for share in shares]
        self._tests = [_SlowRanks(len(group), chances, rule) for group in self._groups]
        self._latest = torch.full((num_times, len(peers)), torch.nan)

    @property
    def is_measuring(self) -> bool:
        """Whether there are too few reports for a verdict on any rank."""
        rows = range(len(self._latest))
        return not any(test.is_ready(row) for test in self._tests for row in rows)

    def add(self, values: torch.Tensor) -> None:
        """Judge a report with the logarithms of times, ``[num_times, world]``, NaN if unknown."""
        self.found = {}
        self._latest = values.where(values.isfinite(), self._latest)
        is_all = len(self._groups) == 1
        for group, test in zip(self._groups, self._tests, strict=True):
            latest, of_group = (
                every if is_all else every[:, group] for every in (self._latest, values)
            )
            drifts = [self._find_drift(row, group) for row in range(len(latest))]
            for row, found in enumerate(test.judge(of_group, latest, drifts)):
                ranks = group.tolist() if found else []
                self.found.update({(row, ranks[index]): z for index, z in found.items()})

    def _find_drift(self, row: int, group: torch.Tensor) -> float:
        """Return the usual time of the other ranks, for a rank without peers."""
        others = self._latest[row]
        if len(group) > 1 or len(others) == 1:
            return 0.0
        if len(others) <= _MANY:  # else a single rank hardly moves the median
            others = others[torch.arange(len(others)) != group]
        [drift] = row_medians(others[None])
        return drift if math.isfinite(drift) else 0.0


class _SlowRanks:
    """Finds the slow ranks among peers by their times in each row, from their last reports.

    ``chances`` are those of a false verdict on a rank in a report. A small operation of torch costs
    as much as one over many ranks, so all rows are judged at once until a rank may be slow.
    """

    def __init__(self, num: int, chances: Sequence[float], rule: OutlierRule) -> None:
        self._num, self._chances = num, [chance / 2 for chance in chances]
        # Without peers the past is all there is, and the noise decides.
        individual = rule.individual
        if num == 1 and individual == OutlierRule.individual:
            individual = _INDIVIDUAL_ALONE
        self._individual = -math.log(max(individual, 1e-300))
        self._relative = -math.log(max(rule.relative, 1e-300))
        self._step = max(1, num // _NUM_SAMPLED)
        rows, sampled = len(chances), len(range(0, num, self._step))
        fewest, most = _NUM_MEASURED
        num_measured = max(fewest, min(most, _MOST_MEASURED // sampled))
        self._recent = torch.full((_NUM_RECENT, rows, num), torch.nan)
        self._quartiles = torch.full((_NUM_RECENT, rows, 1), torch.nan)
        self._measured = torch.full((num_measured, rows, sampled), torch.nan)
        self._age = torch.zeros(rows, num)
        self._num_reports, self._num_silent = [0] * rows, [0] * rows
        self._found: list[Found] = [{}] * rows

    def is_ready(self, row: int) -> bool:
        """Whether the noise of a row is known."""
        fewest = _FEWEST_OF_MANY if self._num >= _MANY else _FEWEST_OF_FEW.get(self._num, _FEWEST)
        return self._num_reports[row] >= fewest

    def judge(self, values: torch.Tensor, latest: torch.Tensor, drifts: list[float]) -> list[Found]:
        """Return the slow ranks of each row after a report.

        ``values`` ``[num_rows, num]`` are NaN if unknown. ``latest`` are the last known values.
        ``drifts`` are subtracted from a rank without peers.
        """
        known = values.isfinite()
        has_values = known.any(dim=1, keepdim=True)
        medians = row_medians(latest) if self._num > 1 else drifts
        middles = latest.new_tensor(medians).unsqueeze(1)
        relative = latest - middles
        counts = relative.isfinite().sum(dim=1).tolist()
        # NaN is sorted to the end.
        places = [1 + max(0, count - 1) // 4 for count in counts]
        lower = [row.kthvalue(place).values for row, place in zip(relative, places, strict=True)]
        quartiles = torch.stack(lower).unsqueeze(1)
        at = slice(None, None, self._step)
        self._recent = _push(self._recent, relative, known)
        self._measured = _push(self._measured, relative[:, at], known[:, at])
        self._quartiles = _push(self._quartiles, quartiles, has_values)
        self._age = torch.where(has_values, (self._age + 1) * ~known, self._age)
        iteration_ms = latest[0].nanmedian().exp().item()
        usual_ms = (quartiles + middles).exp().flatten().tolist()
        least = [compute_least_excess(each, iteration_ms) for each in usual_ms]
        ready = []
        for row, is_known in enumerate(has_values[:, 0].tolist()):
            # The verdict of the last values holds for some time.
            self._num_silent[row] = 0 if is_known else self._num_silent[row] + 1
            self._num_reports[row] += is_known
            if is_known or self._num_silent[row] > _NUM_RECENT:
                self._found[row] = {}
            if is_known and self.is_ready(row):
                ready.append(row)
        if ready:
            self._noises: dict[int, _Noise] = {}
            self._compare_with_past(ready, least)
            self._compare_with_peers(ready, least, counts)
        return self._found

    def _measure_noise(self, row: int) -> _Noise:
        """Measure the noise once, and only if a rank is slow enough to matter."""
        if row not in self._noises:
            num = min(self._num_reports[row], len(self._measured))
            self._noises[row] = _Noise(self._measured[:, row], num, self._num)
        return self._noises[row]

    def _compare_with_past(self, ready: list[int], least: list[float]) -> None:
        """Find ranks that have become slower while their peers have not."""
        latest = _PAST_WINDOWS[-1][0]
        ready = [row for row in ready if self._num_reports[row] >= 2 * _NUM_NEIGHBOURS + latest]
        spans = [min(num, _NUM_RECENT) for num in self._num_reports]
        usual = self._recent[-max(spans) : -latest].mean(dim=0)
        for row in ready if min(spans) < max(spans) else ():
            usual[row] = self._recent[-spans[row] : -latest, row].mean(dim=0)
        least = [max(each, self._individual) for each in least]
        leads = self._recent[-latest:] - usual
        for row, test in self._find_suspects(ready, _PAST_WINDOWS, leads, least):
            self._found[row] = test(self._measure_noise(row), measure=_Noise.measure_changes)

    def _compare_with_peers(self, ready: list[int], least: list[float], counts: list[int]) -> None:
        """Find ranks that are slower than the faster half of their peers."""
        ready = [row for row in ready if counts[row] > 1]
        least = [max(each, self._relative) for each in least]
        leads = self._recent - self._quartiles
        for row, test in self._find_suspects(ready, _WINDOWS, leads, least):
            self._found[row] |= test(
                self._measure_noise(row),
                measure=_Noise.measure_windows,
                place=max(0.0, -expected_place(1 + (counts[row] - 1) // 4, counts[row])),
                # The variance of a lower quartile of n normal values is 1.86 / n.
                factor=math.sqrt(1 + 1.86 / counts[row]),
            )

    def _find_suspects(
        self, ready: list[int], windows: Sequence[tuple[int, int]], leads: torch.Tensor,
        least: list[float],
    ) -> Iterator[tuple[int, Callable[..., Found]]]:  # fmt: skip
        """Yield each row in which a rank's mean lead is large enough to matter, with its test."""
        means = torch.stack([leads[-size:].mean(dim=0) for size, _ in windows])
        means.masked_fill_(self._age > _NUM_RECENT, torch.nan)
        matters = (means >= means.new_tensor(least)[:, None]).any(dim=2).any(dim=0).tolist()
        for row in ready:
            if matters[row]:
                chance = self._chances[row] / len(windows)
                given = windows, leads[:, row], means[:, row], least[row], chance
                yield row, partial(_test_windows, *given)


class _Noise:
    """The noise of a rank's values, from the last ``num`` of ``measured`` ``[.., sampled]``."""

    def __init__(self, measured: torch.Tensor, num: int, num_ranks: int) -> None:
        self._past = past = measured[-num:]
        self._num_ranks = num_ranks
        # Subtracting the median of the ranks took a share of the variance.
        self._factor = math.sqrt(num_ranks / (num_ranks - 1)) if num_ranks > 1 else 1.0
        near = _compute_median_of_five([past[at : len(past) - 4 + at] for at in range(5)])
        near = torch.cat([near[:1], near[:1], near, near[-1:], near[-1:]])
        steps = past - near
        self._steps = steps[steps.isfinite()] * (_SCALE * self._factor)
        num = len(self._steps)
        # One in five is the median itself.
        self.weight = int(0.8 * num / self._factor**2)
        self.sigma = max(
            _LEAST_NOISE, *(measure_deviation(self._steps, share) for share in _SHARES)
        )

    def find_quantile(self, size: int, count: int, chance: float) -> float:
        """Return the value above which ``count`` of ``size`` values are with a given chance."""
        num_above = _find_num_above(self.weight, size, count, chance)
        if num_above < 0:  # too few measurements
            return 2 * self._steps.abs().max().item()
        num = len(self._steps)
        place = num - int(num_above / self.weight * num)
        return self._steps.kthvalue(max(place, 1)).values.item()

    def measure_windows(self, size: int) -> float:
        """Return the standard deviation of the mean of ``size`` values."""
        sigmas = [self.sigma / math.sqrt(size), self._lasting_sigma]
        means = self._average(size, until=size)
        for lag in (size, *_LAGS):
            if len(means) >= 2 * lag:
                # Not the mean: changes of speed are a minority.
                change = measure_deviation(means[lag:] - means[:-lag], 0.5) / math.sqrt(2)
                sigmas.append(self._factor * change)
        return max(sigmas)

    def measure_changes(self, size: int) -> float:
        """Return the standard deviation of the mean of ``size`` values minus that of earlier."""
        sigma = self.sigma * math.sqrt(1 / size + 1 / _NUM_EARLIER)
        later, earlier = self._average(size, until=size), self._average(_NUM_EARLIER, until=size)
        if (num := len(later) - _NUM_EARLIER) <= _NUM_EARLIER:
            return sigma
        change = later[-num:] - earlier[-num - size : -size]
        return max(sigma, *(self._factor * measure_deviation(change, share) for share in _SHARES))

    @functools.cached_property
    def _lasting_sigma(self) -> float:
        """The standard deviation of noise that lasts for several reports, or 0.0.

        Values of such noise differ more, the more reports are between them. It may last for longer
        than the first reports, so their growth is continued.
        """
        # A rank that has just become slow is not noise. The first reports are all needed.
        is_start = len(self._past) <= _NUM_START
        past = self._past if is_start else self._past[:-10]
        # Of two or three ranks the differences vary too much.
        continues = is_start and self._num_ranks > 3
        share, part = (0.8, 2) if continues else (0.5, 3)
        lags = [2**k for k in range(7) if part * 2**k <= len(past)]
        sigmas = [
            self._factor * measure_deviation(past[lag:] - past[:-lag], share) / math.sqrt(2)
            for lag in lags
        ]
        # A few differences vary by chance.
        least = _GROWTH_AT_START if continues else _GROWTH + self._factor / math.sqrt(past.numel())
        largest = max(sigmas) if continues else sigmas[-1]
        if len(sigmas) < 2 or largest < least * sigmas[0]:
            return 0.0
        # The growth continues: by the last step, or at the start by twice the whole growth so far.
        before = sigmas[0] / 2 if continues else sigmas[-2]
        return largest * max(1.0, largest / max(before, _LEAST_NOISE))

    def _average(self, size: int, *, until: int) -> torch.Tensor:
        past = self._past[:-until]
        return past.unfold(0, size, 1).mean(dim=-1) if len(past) >= size else past[:0]


def _test_windows(
    windows: Sequence[tuple[int, int]], leads: torch.Tensor, means: torch.Tensor, least: float,
    chance: float, noise: _Noise, *, measure: Callable[[_Noise, int], float], place: float = 0.0,
    factor: float = 1.0,
) -> Found:  # fmt: skip
    """Find ranks by their leads over the usual values ``[reports, num]``: level, count, size.

    ``measure`` returns the standard deviation of the mean of a window, and ``factor`` is that of a
    lead. ``place`` is the expected lead of equal ranks. Both are in units of the noise.
    """
    found: Found = {}
    if noise.weight < _LEAST_MEASUREMENTS:
        return found
    bias = place * noise.sigma
    multiple = _compute_multiple(chance, noise.weight)
    for (size, count), excess in zip(windows, means, strict=True):
        limit = max(least, bias + multiple * factor * noise.sigma / math.sqrt(size))
        if not (excess >= limit).any():
            continue
        sigma = factor * max(measure(noise, size), _measure_spread(excess))
        index = (excess >= max(limit, bias + multiple * sigma)).nonzero().flatten()
        needed = bias + noise.find_quantile(size, count, chance)
        is_above = leads[-size:, index] > (excess[index] / 2).clamp(min=needed)
        index = index[is_above.sum(dim=0) >= count]
        z = ((excess[index].double() - bias) / sigma).tolist()
        for each, distance in zip(index.tolist(), z, strict=True):
            found[each] = max(distance, found.get(each, 0.0))
    return found


def _compute_median_of_five(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the medians, NaN if a value is. Much cheaper than sorting."""
    a, b, c, d, e = values
    low = a.minimum(b).maximum(c.minimum(d))
    high = a.maximum(b).minimum(c.maximum(d))
    return low.minimum(high).maximum(low.maximum(high).minimum(e))


def row_medians(rows: torch.Tensor) -> list[float]:
    """Return the median of the finite values of each row: of two middle values, their mean."""
    if rows.numel() <= _FEW:  # an operation of torch takes longer than all of this
        known = [[value for value in row if math.isfinite(value)] for row in rows.tolist()]
        return [median(row) if row else math.nan for row in known]
    num_known = [rows.shape[1]] * len(rows)
    if not is_finite(rows):
        finite = rows.isfinite()
        rows, num_known = rows.where(finite, torch.nan), finite.sum(dim=1).tolist()
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


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, by their sum: much cheaper than checking each value.

    A sum that overflows returns False, which only costs time.
    """
    return math.isfinite(values.sum().item())


def _push(kept: torch.Tensor, values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Append the known values ``[rows, num]`` to the last values, ``[num_kept, rows, num]``."""
    pushed = torch.cat([kept[1:], values.unsqueeze(0)])
    return pushed if known.all() else torch.where(known, pushed, kept)


def measure_deviation(values: torch.Tensor, share: float) -> float:
    """Return the standard deviation of values around 0, from the smallest ``share`` of them."""
    known = (values.flatten() if is_finite(values) else values[values.isfinite()]).abs()
    if not len(known):
        return 0.0
    within = known.kthvalue(1 + int(share * (len(known) - 1))).values.item()
    return within / _NORMAL.inv_cdf((1 + share) / 2)


def _measure_spread(values: torch.Tensor) -> float:
    """Return the standard deviation of many ranks, from the faster ones. 0.0 for few ranks."""
    num = int(values.isfinite().sum())
    if num < _MANY:
        return 0.0
    places = (1 + num // 50, 1 + num // 10, 1 + (num - 1) // 4, 1 + int(0.4 * num))
    value = [values.kthvalue(place).values.item() for place in places]
    normal = [expected_place(place, num) for place in places]
    pairs = ((0, 2), (1, 2), (1, 3))
    return max((value[b] - value[a]) / (normal[b] - normal[a]) for a, b in pairs)


def compute_least_excess(usual_ms: float, iteration_ms: float) -> float:
    """Return the least excess of a time that matters, as a logarithm."""
    share = iteration_ms if math.isfinite(iteration_ms) else usual_ms
    return math.log1p(max(_LEAST_EXCESS_MS, _LEAST_EXCESS_SHARE * share) / max(usual_ms, 1e-9))


def compute_chance(z: float) -> float:
    """Return the chance that a normal value is above ``z``."""
    return math.erfc(z / math.sqrt(2)) / 2


@functools.lru_cache(maxsize=4096)
def expected_place(place: int, num: int) -> float:
    """Return the expected ``place``-th smallest of ``num`` normal values (G. Blom, 1958)."""
    return _NORMAL.inv_cdf((place - 0.375) / (num + 0.25))


def _compute_multiple(chance: float, num: int) -> float:
    """Return the quantile of Student's distribution with ``num`` degrees of freedom, nearly.

    The first terms of the expansion of Cornish and Fisher.
    """
    z = -_NORMAL.inv_cdf(max(chance, 1e-300))
    return z * (1 + (z**2 + 1) / (4 * num) + (5 * z**4 + 16 * z**2 + 3) / (96 * num**2))


@functools.lru_cache(maxsize=1024)
def _find_num_above(num: int, size: int, count: int, chance: float) -> int:
    """Return a rank among ``num`` values: it is rare that ``count`` of ``size`` are above it.

    The largest number of the ``num`` values that may be above it, or -1 if no value is far enough.
    """
    low, high = -1, num - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _compute_chance(num, middle, size, count) <= chance:
            low = middle
        else:
            high = middle - 1
    return low


def _compute_chance(num: int, num_above: int, size: int, count: int) -> float:
    """Return the chance that at least ``count`` of ``size`` values exceed a value of ``num``."""
    a, b = num_above + 1, num - num_above
    return sum(
        math.comb(size, k) * math.exp(_log_beta(a + k, b + size - k) - _log_beta(a, b))
        for k in range(count, size + 1)
    )


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
