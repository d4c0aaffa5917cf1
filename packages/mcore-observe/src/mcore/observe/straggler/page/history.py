"""Values of all ranks over the last reports, in bounded memory, and how they come as rows."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from mcore.observe.straggler.comparison import RankComparison
from mcore.observe.straggler.outliers import Outlier

Summary: TypeAlias = Literal["worst", "median"]

MOST_REPORTS = 500
MOST_BYTES = 128 << 20
MOST_ROWS = 512  # that a map has; 4,096 ranks come as eight a row
SPREAD = ("mean", "sd", "min", "median", "max")

_MOST_CODE = 65535
_MOST_EPISODES = 50
_MOST_SCALARS, _MOST_POINTS = 32, 240
_GAPS = 8  # between reports, that the usual one is the median of


@dataclass(frozen=True)
class Metric:
    """One thing that all ranks measure, and whether little of it is bad."""

    name: str
    label: str
    unit: str
    is_low_bad: bool = False


_METRICS = (
    Metric("elapsed_ms", "Round trip", "ms"),
    Metric("data_ms", "Data, longest", "ms"),
    Metric("temp_c", "Temperature", "C"),
    Metric("power_w", "Power", "W"),
    Metric("util_pct", "Utilisation", "%", True),
    Metric("clock_mhz", "Clock", "MHz", True),
    Metric("etpt_tf", "Throughput", "TF", True),
)


@dataclass(frozen=True)
class Episode:
    """A time in which a rank was slow; ``until`` is None while it lasts."""

    rank: int
    since: float
    until: float | None = None


@dataclass(frozen=True)
class Columns:
    """Reports as columns of a map, oldest first.

    ``codes`` is int16 ``[num_reports, num_rows]``, to be read without sign: 0 is no value, 1 to
    65535 go from ``low`` to ``high`` of the report.
    """

    first_report: int
    times: list[float]
    group: int  # ranks in a row
    codes: torch.Tensor
    low: list[float]
    high: list[float]
    spread: list[list[float]]  # in the order of SPREAD


class _Kept:
    """One report: float32 ``[num_metrics, world]``."""

    __slots__ = ("_spread", "unix_time", "values")

    def __init__(self, unix_time: float, values: torch.Tensor) -> None:
        self.unix_time, self.values = unix_time, values
        self._spread: dict[int, list[float]] = {}

    def spread(self, metric: int) -> list[float]:
        """Return mean, deviation and so on, as ``SPREAD`` has them; computed when asked for."""
        if metric not in self._spread:
            values = self.values[metric]
            mean = values.nanmean()
            sd = (values - mean).square_().nanmean().sqrt_()
            low, high = (_worst(values.unsqueeze(0), is_low)[0] for is_low in (True, False))
            numbers = torch.stack([mean, sd, low, values.nanmedian(), high])
            self._spread[metric] = numbers.tolist()
        return self._spread[metric]


class _Series:
    """A number over the whole run in at most 240 points: as they fill up, every other one goes."""

    def __init__(self) -> None:
        self.last = math.nan
        self.points: list[float] = []
        self._every, self._count = 1, 0

    def add(self, value: float) -> None:
        self.last = value
        if self._count % self._every == 0:
            if len(self.points) == _MOST_POINTS:
                del self.points[1::2]
                self._every *= 2
            self.points.append(value)
        self._count += 1


class History:
    """The last 500 reports, fewer where they would take more than 128 MiB. For any thread."""

    def __init__(self, *, most_reports: int = MOST_REPORTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_reports, self._most_bytes = most_reports, most_bytes
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque()
        self._num_reports = 0
        self._made_at: float | None = None
        self._stragglers: tuple[Outlier, ...] = ()
        self._slow: dict[int, Episode] = {}
        self._recovered: deque[Episode] = deque(maxlen=_MOST_EPISODES)
        self._scalars: dict[str, _Series] = {}
        self.epoch = time.time_ns() // 1000
        self.metrics: tuple[Metric, ...] = _METRICS
        self.places: list[tuple[str, str]] = []

    @property
    def num_reports(self) -> int:
        """How many reports there have been."""
        return self._num_reports

    @property
    def num_kept(self) -> int:
        """How many of them can still be shown."""
        return len(self._kept)

    def add(self, found: RankComparison) -> None:
        """Keep a report; copies its numbers and leaves the rest to those who look."""
        values = found.by_rank()
        values = values.where(values.isfinite(), torch.nan)
        slow = tuple(dict.fromkeys(one.rank for one in found.stragglers))
        with self._lock:
            if not self.places:
                self.places = found.places
                self.metrics += tuple(_section(name) for name in found.section_names)
            self._note_slow(found.unix_time, slow)
            self._stragglers = found.stragglers
            self._kept.append(_Kept(found.unix_time, values))
            most = min(self._most_reports, self._most_bytes // (values.numel() * 4))
            while len(self._kept) > max(most, 1):
                self._kept.popleft()
            self._num_reports += 1
            self._made_at = time.monotonic()

    def show(self, scalars: Mapping[str, float]) -> None:
        """Keep numbers of the training; the first 32 names."""
        with self._lock:
            for name, value in scalars.items():
                if name in self._scalars or len(self._scalars) < _MOST_SCALARS:
                    self._scalars.setdefault(name, _Series()).add(value)

    def age_s(self) -> float | None:
        """Return the seconds since the last report; None before the first."""
        return None if self._made_at is None else time.monotonic() - self._made_at

    def usual_gap_s(self) -> float | None:
        """Return the usual time between the last reports; None before the second."""
        with self._lock:
            times = [self._kept[-at].unix_time for at in range(min(len(self._kept), _GAPS), 0, -1)]
        gaps = [max(0.0, after - before) for before, after in itertools.pairwise(times)]
        return statistics.median(gaps) if gaps else None

    def scalars(self) -> list[tuple[str, float, list[float]]]:
        """Return name, last value and points of the training's numbers."""
        with self._lock:
            return [(name, one.last, list(one.points)) for name, one in self._scalars.items()]

    def slow(self) -> list[tuple[Episode, list[Outlier]]]:
        """Return the ranks that are slow, the worst first, with what stands out of each."""
        with self._lock:
            return [
                (episode, [one for one in self._stragglers if one.rank == rank])
                for rank, episode in self._slow.items()
            ]

    def recovered(self) -> list[Episode]:
        """Return the times in which ranks were slow that are over, the latest first."""
        with self._lock:
            return list(reversed(self._recovered))

    def columns(
        self, metric: int, ranks: range, *, since: int, summary: Summary, most_rows: int
    ) -> Columns:
        """Return the reports after the first ``since`` ones, ranks together where too many.

        A row has 1, 2, 4 or more ranks, and their worst value or their median.
        """
        with self._lock:
            first = max(since, self._num_reports - len(self._kept))
            kept = (
                list(self._kept)[first - self._num_reports :] if first < self._num_reports else []
            )
        group = 1
        while math.ceil(len(ranks) / group) > most_rows:
            group *= 2
        is_low_bad = self.metrics[metric].is_low_bad
        columns: list[tuple[torch.Tensor, float, float]] = []
        for report in kept:  # each by itself: none is large enough for threads of its own
            values = report.values[metric, ranks.start : ranks.stop]
            rows = torch.full((math.ceil(len(values) / group) * group,), torch.nan)
            rows[: len(values)] = values
            columns.append(_coded(_summarised(rows.view(-1, group), summary, is_low_bad)))
        codes = [code for code, _, _ in columns] or [torch.empty(0, dtype=torch.int16)]
        return Columns(
            first,
            [report.unix_time for report in kept],
            group,
            torch.stack(codes),
            [low for _, low, _ in columns],
            [high for _, _, high in columns],
            [report.spread(metric) for report in kept],
        )

    def line(self, metric: int, rank: int) -> tuple[int, list[float]]:
        """Return the number of the first report kept, and a rank's values from it on."""
        with self._lock:
            kept, first = list(self._kept), self._num_reports - len(self._kept)
        return first, [report.values[metric, rank].item() for report in kept]

    def known(self) -> list[bool]:
        """Return for each metric whether any rank has a value in the last report."""
        with self._lock:
            values = self._kept[-1].values
        found: list[bool] = values.isfinite().any(dim=1).tolist()
        return found

    def medians(self) -> list[float]:
        """Return the median over the ranks, of two the lower, by metric, of the last report."""
        with self._lock:
            last = self._kept[-1]
        medians: list[float] = last.values.nanmedian(dim=1).values.tolist()
        return medians

    def latest(self, rank: int) -> list[tuple[float, float]]:
        """Return a rank's value and the median over the ranks, by metric, of the last report."""
        with self._lock:
            last = self._kept[-1]
        return list(zip(last.values[:, rank].tolist(), self.medians(), strict=True))

    def worst_rank(self, metric: int, ranks: range, report: int) -> int:
        """Return the rank that is worst off in a report; the first one where nobody has a value."""
        with self._lock:
            at = report - (self._num_reports - len(self._kept))
            kept = self._kept[min(max(at, 0), len(self._kept) - 1)]
        values = kept.values[metric, ranks.start : ranks.stop]
        is_low_bad = self.metrics[metric].is_low_bad
        filled = values.nan_to_num(torch.inf if is_low_bad else -torch.inf)
        return ranks.start + int(filled.argmin() if is_low_bad else filled.argmax())

    def _note_slow(self, unix_time: float, slow: Sequence[int]) -> None:
        before = self._slow
        self._slow = {rank: before.get(rank) or Episode(rank, unix_time) for rank in slow}
        for rank, episode in before.items():
            if rank not in self._slow:
                self._recovered.append(Episode(rank, episode.since, unix_time))


def _section(name: str) -> Metric:
    return Metric(name, "Data, per step" if name == "data" else name, "ms")


def _summarised(values: torch.Tensor, summary: Summary, is_low_bad: bool) -> torch.Tensor:
    """Return one value for each row of ``[n, m]``; NaN where it has none."""
    if values.shape[1] == 1:
        return values.flatten()
    if summary == "median":
        return values.nanmedian(dim=1).values
    return _worst(values, is_low_bad)


def _worst(values: torch.Tensor, is_low_bad: bool) -> torch.Tensor:
    filled = values.nan_to_num(torch.inf if is_low_bad else -torch.inf)
    found = filled.amin(dim=1) if is_low_bad else filled.amax(dim=1)
    return found.where(found.isfinite(), torch.nan)


def _coded(values: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Return values as int16 codes, see :class:`Columns`, with the lowest and the highest."""
    low = values.nan_to_num(torch.inf).min().item() if len(values) else math.inf
    if math.isinf(low):
        return torch.zeros(len(values), dtype=torch.int16), math.nan, math.nan
    high = values.nan_to_num(-torch.inf).max().item()
    steps = (values - low) * ((_MOST_CODE - 1) / (high - low)) if high > low else values * 0
    codes = steps.round_().add_(1).nan_to_num(0).to(torch.int32)
    return codes.to(torch.int16), low, high
