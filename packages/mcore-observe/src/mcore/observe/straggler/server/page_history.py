"""Values of all ranks over the last reports in bounded memory, and their summary as rows."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from mcore.observe.straggler.outliers import Outlier
from mcore.observe.straggler.report import RankComparison

Summary: TypeAlias = Literal["worst", "median"]

MOST_REPORTS = 500
MOST_BYTES = 128 << 20
MOST_ROWS = 512  # of a map: with 4,096 ranks, a row is eight ranks
_SPREAD = ("mean", "sd", "min", "median", "max")

_MOST_CODE = 65535
_MOST_EPISODES = 50
_MOST_SCALARS, _MOST_POINTS = 32, 240
_GAPS = 8  # between reports, whose median is the usual gap


@dataclass(frozen=True)
class Metric:
    """A value that all ranks measure, and whether low values are bad."""

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
    """A time in which a rank was slow. ``until`` is None while it lasts."""

    rank: int
    since: float
    until: float | None = None


class _Kept:
    """One report: float32 ``[num_metrics, world]``."""

    __slots__ = ("_spread", "unix_time", "values")

    def __init__(self, unix_time: float, values: torch.Tensor) -> None:
        self.unix_time, self.values = unix_time, values
        self._spread: dict[int, list[float]] = {}

    def spread(self, metric: int) -> list[float]:
        """Return the numbers named by ``_SPREAD``. They are computed at the first call."""
        if metric not in self._spread:
            values = self.values[metric]
            mean = values.nanmean()
            sd = (values - mean).square_().nanmean().sqrt_()
            low, high = (_find_worst(values.unsqueeze(0), is_low)[0] for is_low in (True, False))
            numbers = torch.stack([mean, sd, low, values.nanmedian(), high])
            self._spread[metric] = numbers.tolist()
        return self._spread[metric]


class _Series:
    """A number over the whole run in at most 240 points: if full, every other point is dropped."""

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
    """The last 500 reports, or as many as fit into 128 MiB. Any thread may call it."""

    def __init__(self, *, most_reports: int = MOST_REPORTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_reports, self._most_bytes = most_reports, most_bytes
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque()
        self.num_reports = 0
        self._made_at: float | None = None
        self._stragglers: tuple[Outlier, ...] = ()
        self.is_measuring = False
        self._slow: dict[int, Episode] = {}
        self._recovered: deque[Episode] = deque(maxlen=_MOST_EPISODES)
        self._scalars: dict[str, _Series] = {}
        self.epoch = time.time_ns() // 1000
        self.metrics: tuple[Metric, ...] = _METRICS
        self.places: list[tuple[str, str]] = []

    @property
    def num_kept(self) -> int:
        """The number of reports that are kept."""
        return len(self._kept)

    def add(self, comparison: RankComparison) -> None:
        """Keep the numbers of a report. Everything else is computed when the page requests it."""
        values = comparison.by_rank()
        values = values.where(values.isfinite(), torch.nan)
        slow = tuple(dict.fromkeys(one.rank for one in comparison.stragglers))
        with self._lock:
            if not self.places:
                self.places = comparison.places
                self.metrics += tuple(
                    Metric(name, "Data, per step" if name == "data" else name, "ms")
                    for name in comparison.section_names
                )
            before, now = self._slow, comparison.unix_time
            self._slow = {rank: before.get(rank) or Episode(rank, now) for rank in slow}
            self._recovered.extend(
                Episode(rank, episode.since, now)
                for rank, episode in before.items()
                if rank not in self._slow
            )
            self._stragglers = comparison.stragglers
            self.is_measuring = comparison.is_measuring
            self._kept.append(_Kept(now, values))
            most = min(self._most_reports, self._most_bytes // (values.numel() * 4))
            while len(self._kept) > max(most, 1):
                self._kept.popleft()
            self.num_reports += 1
            self._made_at = time.monotonic()

    def show(self, scalars: Mapping[str, float]) -> None:
        """Keep numbers of the training. Only the first 32 names are kept."""
        with self._lock:
            for name, value in scalars.items():
                if name in self._scalars or len(self._scalars) < _MOST_SCALARS:
                    self._scalars.setdefault(name, _Series()).add(value)

    def age_s(self) -> float | None:
        """Return the seconds since the last report. None before the first."""
        return None if self._made_at is None else time.monotonic() - self._made_at

    def usual_gap_s(self) -> float | None:
        """Return the median time between the last reports. None before the second."""
        with self._lock:
            times = [self._kept[-at].unix_time for at in range(min(len(self._kept), _GAPS), 0, -1)]
        gaps = [max(0.0, after - before) for before, after in itertools.pairwise(times)]
        return statistics.median(gaps) if gaps else None

    def scalars(self) -> list[tuple[str, float, list[float]]]:
        """Return name, last value and points of each number of the training."""
        with self._lock:
            return [(name, one.last, list(one.points)) for name, one in self._scalars.items()]

    def slow(self) -> list[tuple[Episode, list[Outlier]]]:
        """Return the slow ranks, the worst first, with the outliers of each."""
        with self._lock:
            return [
                (episode, [one for one in self._stragglers if one.rank == rank])
                for rank, episode in self._slow.items()
            ]

    def recovered(self) -> list[Episode]:
        """Return the past times in which ranks were slow, the latest first."""
        with self._lock:
            return list(reversed(self._recovered))

    def columns(
        self, metric: int, ranks: range, *, since: int, summary: Summary, most_rows: int
    ) -> dict[str, Any]:
        """Return the reports after the first ``since`` as columns of a map, oldest first.

        A column has at most ``most_rows`` rows. A row is a ``group`` of 1, 2, 4 or more ranks and
        has their worst or median value. ``codes`` is int16 ``[num_reports, num_rows]``, read as
        unsigned by the page. 0 is no value, 1 is ``low`` and 65535 is ``high`` of the report.
        """
        with self._lock:
            first = max(since, self.num_reports - len(self._kept))
            kept = list(self._kept)[first - self.num_reports :] if first < self.num_reports else []
        group = 1
        while math.ceil(len(ranks) / group) > most_rows:
            group *= 2
        is_low_bad = self.metrics[metric].is_low_bad
        columns: list[tuple[torch.Tensor, float, float]] = []
        for report in kept:  # separately: torch would start threads for all of them together
            values = report.values[metric, ranks.start : ranks.stop]
            rows = torch.full((math.ceil(len(values) / group) * group,), torch.nan)
            rows[: len(values)] = values
            if group == 1:
                summarized = rows
            elif summary == "median":
                summarized = rows.view(-1, group).nanmedian(dim=1).values
            else:
                summarized = _find_worst(rows.view(-1, group), is_low_bad)
            columns.append(_encode(summarized))
        codes = [code for code, _, _ in columns] or [torch.empty(0, dtype=torch.int16)]
        spread = zip(*[report.spread(metric) for report in kept], strict=True)
        return {
            "first_report": first,
            "times": [report.unix_time for report in kept],
            "group": group,
            "codes": torch.stack(codes),
            "low": [low for _, low, _ in columns],
            "high": [high for _, _, high in columns],
            "spread": dict(zip(_SPREAD, spread if kept else [()] * len(_SPREAD), strict=True)),
        }

    def line(self, metric: int, rank: int) -> tuple[int, list[float]]:
        """Return the number of the first report that is kept, and a rank's values from there."""
        with self._lock:
            kept, first = list(self._kept), self.num_reports - len(self._kept)
        return first, [report.values[metric, rank].item() for report in kept]

    def known(self) -> list[bool]:
        """Return for each metric whether any rank has a value in the last report."""
        is_known: list[bool] = self._last_values().isfinite().any(dim=1).tolist()
        return is_known

    def _last_values(self) -> torch.Tensor:
        with self._lock:
            return self._kept[-1].values

    def medians(self) -> list[float]:
        """Return the (lower) median over the ranks in the last report, by metric."""
        medians: list[float] = self._last_values().nanmedian(dim=1).values.tolist()
        return medians

    def latest(self, rank: int) -> list[tuple[float, float]]:
        """Return a rank's value and the median over the ranks in the last report, by metric."""
        return list(zip(self._last_values()[:, rank].tolist(), self.medians(), strict=True))

    def worst_rank(self, metric: int, ranks: range, report: int) -> int:
        """Return the rank with the worst value in a report, the first rank if there is no value."""
        with self._lock:
            at = report - (self.num_reports - len(self._kept))
            kept = self._kept[min(max(at, 0), len(self._kept) - 1)]
        values = kept.values[metric, ranks.start : ranks.stop]
        is_low_bad = self.metrics[metric].is_low_bad
        filled = values.nan_to_num(torch.inf if is_low_bad else -torch.inf)
        return ranks.start + int(filled.argmin() if is_low_bad else filled.argmax())


def _find_worst(values: torch.Tensor, is_low_bad: bool) -> torch.Tensor:
    """Return the worst value of each row of ``[n, m]``. NaN if it has none."""
    filled = values.nan_to_num(torch.inf if is_low_bad else -torch.inf)
    worst = filled.amin(dim=1) if is_low_bad else filled.amax(dim=1)
    return worst.where(worst.isfinite(), torch.nan)


def _encode(values: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Return values as int16 codes (see ``columns``), the lowest and the highest."""
    low = values.nan_to_num(torch.inf).min().item() if len(values) else math.inf
    if math.isinf(low):
        return torch.zeros(len(values), dtype=torch.int16), math.nan, math.nan
    high = values.nan_to_num(-torch.inf).max().item()
    steps = (values - low) * ((_MOST_CODE - 1) / (high - low)) if high > low else values * 0
    # By way of int32, since a float beyond int16 has no defined conversion.
    codes = steps.round_().add_(1).nan_to_num(0).to(torch.int32)
    return codes.to(torch.int16), low, high
