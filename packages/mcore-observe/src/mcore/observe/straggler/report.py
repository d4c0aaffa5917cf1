"""The report about all ranks, and the comparison of their rows that it is made from."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial, reduce
from heapq import nlargest, nsmallest
from typing import Any, TypeAlias

import torch

from mcore.observe.straggler.exchange import (
    METRICS,
    SECTIONS_START,
    STATS_PER_SECTION,
    GatheredRows,
)
from mcore.observe.straggler.outliers import (
    Extremes,
    Outlier,
    PastReports,
    Places,
    find_outliers,
    relative_scores,
    row_extremes,
)
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, SectionStats
from mcore.observe.straggler.verdict import row_medians

ThroughputEnds: TypeAlias = tuple[list[tuple[float, int]], list[tuple[float, int]]]

_MEDIANS = slice(SECTIONS_START + 2, None, STATS_PER_SECTION)  # of count, sum, median, max
_PREFIX = "mcore_straggler_"
_Samples: TypeAlias = Mapping[str, tuple[Sequence[str], Iterable[float]]]
_NOT_FINITE = (("nan", "NaN"), ("inf", "+Inf"), ("-inf", "-Inf"))  # of Python and Prometheus
# Metric -> name for Prometheus, factor to the base unit, help.
_GAUGES = {
    "elapsed_ms": ("iteration_seconds", 1e-3, "Time of the compute ranges per iteration."),
    "data_ms": ("data_seconds", 1e-3, "Longest data range of the last interval."),
    "temp_c": ("gpu_temperature_celsius", 1.0, "Temperature of the GPU."),
    "power_w": ("gpu_power_watts", 1.0, "Power that the GPU draws."),
    "util_pct": ("gpu_utilization_ratio", 1e-2, "Utilisation of the GPU from 0 to 1."),
    "clock_mhz": ("gpu_clock_hertz", 1e6, "Clock of the GPU."),
    "etpt_tf": ("estimated_tflops", 1.0, "Estimated throughput in TFLOP/s."),
}


class _ValueWithRank:
    """A number, the rank that measured it and its unit.

    ``<``, ``>``, ``<=`` and ``>=`` compare only the values. ``==`` compares all three.

    Args:
        value: The number.
        rank: The rank.
        unit: The unit, for the text.

    Example:
        >>> slow, fast = _ValueWithRank(48.0, 3, "ms"), _ValueWithRank(20.0, 1, "ms")
        >>> str(fast), fast < slow, slow()
        ('20.00ms/1', True, (48.0, 3, 'ms'))
    """

    __slots__ = ("_rank", "_unit", "_value")

    def __init__(self, value: float, rank: int, unit: str = "") -> None:
        self._value = value
        self._rank = rank
        self._unit = unit

    def __call__(self) -> tuple[float, int, str]:
        """Return the value, the rank and the unit."""
        return self._value, self._rank, self._unit

    def __lt__(self, other: _ValueWithRank) -> bool:
        return self._value < other._value

    def __gt__(self, other: _ValueWithRank) -> bool:
        return self._value > other._value

    def __le__(self, other: _ValueWithRank) -> bool:
        return self._value <= other._value

    def __ge__(self, other: _ValueWithRank) -> bool:
        return self._value >= other._value

    def __eq__(self, other: object) -> bool:
        return self() == other() if isinstance(other, _ValueWithRank) else NotImplemented

    def __hash__(self) -> int:
        return hash(self())

    def __str__(self) -> str:
        return f"{self._value:.2f}{self._unit}/{self._rank}"

    def __repr__(self) -> str:
        return f"_ValueWithRank({self._value!r}, {self._rank!r}, {self._unit!r})"


_NO_MS, _NO_C, _NO_W, _NO_PERCENT, _NO_MHZ = (
    partial(_ValueWithRank, math.nan, -1, unit) for unit in ("ms", "C", "W", "%", "MHz")
)


@dataclass
class _StragglerData:
    """Smallest and largest value of each metric over the ranks. NaN and rank -1 if unknown.

    Attributes:
        min_elapsed: Shortest time of the compute ranges per iteration, ms.
        max_elapsed: Longest time of the compute ranges per iteration, ms.
        min_btime: Shortest of the ranks' longest data ranges, ms.
        max_btime: Longest data range of all ranks, ms.
        min_temp: Lowest GPU temperature, C.
        max_temp: Highest GPU temperature, C.
        min_power: Lowest GPU power, W.
        max_power: Highest GPU power, W.
        min_util: Lowest GPU utilisation, %.
        max_util: Highest GPU utilisation, %.
        min_clock: Lowest GPU clock, MHz.
        max_clock: Highest GPU clock, MHz.
        aflops: Estimated throughput of every rank, TFLOP/s, ascending. None if not requested.

    Example:
        >>> str(_StragglerData().min_power)
        'nanW/-1'
    """

    min_elapsed: _ValueWithRank = field(default_factory=_NO_MS)
    max_elapsed: _ValueWithRank = field(default_factory=_NO_MS)
    min_btime: _ValueWithRank = field(default_factory=_NO_MS)
    max_btime: _ValueWithRank = field(default_factory=_NO_MS)
    min_temp: _ValueWithRank = field(default_factory=_NO_C)
    max_temp: _ValueWithRank = field(default_factory=_NO_C)
    min_power: _ValueWithRank = field(default_factory=_NO_W)
    max_power: _ValueWithRank = field(default_factory=_NO_W)
    min_util: _ValueWithRank = field(default_factory=_NO_PERCENT)
    max_util: _ValueWithRank = field(default_factory=_NO_PERCENT)
    min_clock: _ValueWithRank = field(default_factory=_NO_MHZ)
    max_clock: _ValueWithRank = field(default_factory=_NO_MHZ)
    aflops: list[_ValueWithRank] | None = None


@dataclass(frozen=True)
class StragglerReport:
    """Metrics, statistics and scores of all ranks over one interval. Identical on every rank.

    Tuples are indexed by the rank in the group. ``ranks`` has the numbers given to ``configure``,
    which are usually the same. NaN means no data.

    Attributes:
        unix_time: Time of the report, in seconds since 1970.
        world_size: The number of ranks.
        log_interval: Iterations since the last report, as given on rank 0.
        total_flops: Operations of the job in that time, as given on rank 0.
        hosts: Host name of each rank.
        metrics: ``elapsed_ms`` (compute ranges per iteration), ``data_ms`` (longest data range),
            ``temp_c``, ``power_w``, ``util_pct``, ``clock_mhz`` and ``etpt_tf``, by rank.
        sections: Statistics by section and rank. ``"compute"`` and ``"data"`` are built in.
        relative_scores: The fastest rank's median range time over the rank's median, from 0 to 1,
            by section and rank: ``"compute"`` and the declared sections.
        individual_scores: The rank's best median in the last 16 reports over its current median,
            by section and rank.
        outliers: Ranks that stand out in this report, by their times or sensors, the worst first.
        stragglers: Ranks that are slow by their last 3 to 20 known times, compared with their peers
            or with their past. The worst are first. Sensors are never a reason.
        local_sections: Sections timed on this rank without being declared, for this rank only.
        ranks: The number that each rank passed to ``configure``. Empty means 0, 1, 2 and so on.
        devices: Device that each rank computes on, such as ``"cuda:3"``. Empty means unknown.
        measuring: Whether too few reports are known for any of ``stragglers``.

    Example:
        >>> report = StragglerReport(
        ...     unix_time=0.0, world_size=2, log_interval=10, total_flops=1e12, hosts=("a", "b"),
        ...     metrics={"elapsed_ms": (10.0, 15.0)}, sections={},
        ...     relative_scores={"compute": (1.0, 0.66)}, individual_scores={"compute": (1.0, 1.0)},
        ...     outliers=())
        >>> [str(extreme) for extreme in report.min_max("elapsed_ms")]
        ['10.00ms/0', '15.00ms/1']
        >>> report.identify_stragglers()["relative"]
        {'compute': (1,)}
    """

    unix_time: float
    world_size: int
    log_interval: int
    total_flops: float
    hosts: tuple[str, ...]
    metrics: dict[str, tuple[float, ...]]
    sections: dict[str, tuple[SectionStats, ...]]
    relative_scores: dict[str, tuple[float, ...]]
    individual_scores: dict[str, tuple[float, ...]]
    outliers: tuple[Outlier, ...]
    local_sections: dict[str, SectionStats] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    stragglers: tuple[Outlier, ...] = ()
    devices: tuple[str, ...] = ()
    measuring: bool = False

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.world_size)))
        if not self.devices:
            object.__setattr__(self, "devices", ("",) * self.world_size)

    def __eq__(self, other: object) -> bool:
        """Compare all fields. NaN, which means no data, equals NaN."""
        if not isinstance(other, StragglerReport):
            return NotImplemented
        is_equal: bool = _make_plain(asdict(self), math.isnan) == _make_plain(
            asdict(other), math.isnan
        )
        return is_equal

    def min_max(self, metric: str) -> tuple[_ValueWithRank, _ValueWithRank]:
        """Return the smallest and the largest value of a metric, each with its lowest rank.

        Args:
            metric: A key of ``metrics``.

        Returns:
            ``(smallest, largest)``. NaN with rank -1 if no rank has a value.

        Raises:
            ValueError: Unknown metric.
        """
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; give one of {list(METRICS)}")
        by_rank = sorted(zip(self.ranks, self.metrics[metric], strict=True))
        values = torch.tensor([[value for _, value in by_rank]], dtype=torch.float64)
        [ends] = row_extremes(values)
        smallest, largest = (
            _ValueWithRank(value, by_rank[at][0] if at >= 0 else -1, METRICS[metric])
            for value, at in ends
        )
        return smallest, largest

    def throughput_ends(self, num_ranks: int) -> ThroughputEnds:
        """Return the ranks with the lowest and with the highest estimated throughput.

        Args:
            num_ranks: The number of ranks at each end. Ranks without a value are left out.

        Returns:
            Two lists of TFLOP/s and rank, both ascending, equal values by rank.
        """
        return throughput_ends(self.metrics["etpt_tf"], self.ranks, num_ranks)

    def identify_stragglers(
        self, relative: float = 0.75, individual: float = 0.75
    ) -> dict[str, dict[str, tuple[int, ...]]]:
        """List the ranks with scores below a threshold.

        Args:
            relative: Threshold of the relative scores: 0.75 is a third slower than the fastest.
            individual: Threshold of the individual scores.

        Returns:
            Under ``"relative"`` and ``"individual"``, the ranks below the threshold by section.
            Ranks without data are left out.
        """
        return {
            "relative": _select_below(self.relative_scores, relative, self.ranks),
            "individual": _select_below(self.individual_scores, individual, self.ranks),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, with None for NaN."""
        plain: dict[str, Any] = _make_plain(asdict(self), lambda value: not math.isfinite(value))
        return plain

    def to_json(self) -> str:
        """Return everything as JSON, with null for NaN."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_prometheus(self, *, all_ranks: bool = True) -> str:
        """Return the numbers of all ranks in Prometheus' text format 0.0.4.

        Args:
            all_ranks: Whether sections have a sample for each rank, which is megabytes for 4,096
                ranks. False: the minimum, median and maximum over the ranks, with the label ``of``.
        """
        sums = {name: [each.sum_ms for each in stats] for name, stats in self.sections.items()}
        return _format_metrics(self, sums, all_ranks)


def throughput_ends(
    values: Sequence[float], ranks: Sequence[int], num_ranks: int
) -> ThroughputEnds:
    """Return the ``num_ranks`` ranks with the smallest and with the largest values."""
    by_rank = zip(values, ranks, strict=True)
    known = [(value, rank) for value, rank in by_rank if math.isfinite(value)]
    return nsmallest(num_ranks, known), nlargest(num_ranks, known)[::-1]


def _select_below(
    scores: Mapping[str, Sequence[float]], threshold: float, ranks: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks with a score below a threshold, by section. NaN is never below."""
    return {
        name: tuple(rank for rank, score in zip(ranks, by_rank, strict=True) if score < threshold)
        for name, by_rank in scores.items()
    }


def _make_plain(value: Any, is_missing: Callable[[float], bool]) -> Any:
    """Return a value with lists for tuples and None for missing numbers."""
    if isinstance(value, dict):
        return {key: _make_plain(item, is_missing) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_make_plain(item, is_missing) for item in value]
    if isinstance(value, float) and is_missing(value):
        return None
    return value


def _format_metrics(
    report: StragglerReport, sums: Mapping[str, Sequence[float]], all_ranks: bool
) -> str:
    """Format a report, whose sections are not read, and the sum of each section in ms by rank."""
    hosts = {host: labels(host=host) for host in set(report.hosts)}
    by_rank = zip(report.ranks, report.hosts, strict=True)
    ranks = [f'rank="{rank}",{hosts[host]}' for rank, host in by_rank]
    families = [
        family(name, "gauge", text, {"": (ranks, report.metrics[metric])}, factor)
        for metric, (name, factor, text) in _GAUGES.items()
        if metric in report.metrics
    ]
    per_iteration = 1e-3 / max(report.log_interval, 1)
    relative, individual = report.relative_scores, report.individual_scores
    for name, text, sections, factor in (
        ("section_seconds", "Time of the section per iteration.", sums, per_iteration),
        ("relative_score", "Median time of the fastest rank over own.", relative, 1.0),
        ("individual_score", "Best recent median over the current one.", individual, 1.0),
    ):
        samples = {
            labels(section=section): (ranks, values) if all_ranks else (_ENDS, _find_ends(values))
            for section, values in sections.items()
        }
        families.append(family(name, "gauge", text, samples, factor))
    for name, outliers, text in (
        ("outlier", report.outliers, "1 for each rank and metric that stands out."),
        ("straggler", report.stragglers, "1 for each rank and metric bad in several reports."),
    ):
        named = [labels(rank=one.rank, metric=one.metric) for one in outliers]
        families.append(family(name, "gauge", text, {"": (named, [1] * len(named))}))
    return "".join(families)


def _find_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the minimum, the median and the maximum."""
    rows = torch.frombuffer(array("d", values), dtype=torch.float64)[None]
    [((smallest, _), (largest, _))] = row_extremes(rows)
    return smallest, row_medians(rows)[0], largest


def family(name: str, kind: str, text: str, samples: _Samples, factor: float = 1.0) -> str:
    """Return one metric in Prometheus' text format 0.0.4: help, type, and samples with labels.

    ``samples`` has labels and values, by the further labels that they share.
    """
    head = f"{_PREFIX}{name}"
    parts = [f"# HELP {head} {text}\n# TYPE {head} {kind}\n"]
    for shared, (of_samples, values) in samples.items():
        numbers = tuple(value * factor for value in values)
        opened, closed = "{", f"{shared and ','}{shared}}}"
        if of_samples == [""]:
            opened = closed = ""
        if numbers:  # formatted at once, since a call for each of many ranks takes long
            lines = f"{closed} %.12g\n{head}{opened}".join(of_samples)
            lines = f"{head}{opened}{lines}{closed} %.12g\n" % numbers
            for python, prometheus in () if math.isfinite(sum(numbers)) else _NOT_FINITE:
                lines = lines.replace(f" {python}\n", f" {prometheus}\n")
            parts.append(lines)
    return "".join(parts)


def labels(**values: object) -> str:
    """Return the labels of a sample for :func:`family`, with their values escaped."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "%": "%%"})
    return ",".join(f'{name}="{str(value).translate(escapes)}"' for name, value in values.items())


_ENDS = [labels(of=end) for end in ("min", "median", "max")]


class RankComparison:
    """Compares the rows of one exchange. Results are computed when they are first read.

    ``names`` are those of all sections. ``past`` has the reports before, and keeps this one.
    """

    def __init__(
        self,
        rows: GatheredRows,
        *,
        unix_time: float,
        hosts: tuple[str, ...],
        names: Sequence[str],
        past: PastReports,
        local_sections: Mapping[str, SectionStats] | None = None,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.unix_time = unix_time
        self.world_size = len(rows.ranks)
        self.total_flops = rows.total_flops
        self._rows = rows
        self._hosts, self._devices = hosts, devices or ("",) * self.world_size
        self._names = names
        self._past = past
        self._local_sections = dict(local_sections or {})
        self._metrics = rows.metrics()
        medians = rows.matrix[:, _MEDIANS].t().contiguous()
        self._medians = medians.where(medians > 0, torch.nan)
        self._past_medians = past.add(rows, self._medians)
        # The next report changes what the past finds.
        self._kept, self._slow = past.kept(), past.find_stragglers()
        self._last_times, self._last_medians = past.times, past.last_medians
        self.is_measuring = past.is_measuring

    def to_prometheus(self, *, all_ranks: bool) -> str:
        """See :meth:`StragglerReport.to_prometheus`. No object is made for each rank."""
        sums = self._rows.matrix[:, SECTIONS_START + 1 :: STATS_PER_SECTION].t().tolist()
        return _format_metrics(
            self._bare_report, dict(zip(self._names, sums, strict=True)), all_ranks
        )

    @cached_property
    def _best_medians(self) -> torch.Tensor:
        return reduce(torch.fmin, self._past_medians)

    @cached_property
    def report(self) -> StragglerReport:
        """The report of all ranks."""
        numbers = self._rows.matrix[:, SECTIONS_START:]
        columns = numbers.t().reshape(len(self._names), STATS_PER_SECTION, -1).tolist()
        sections = {
            name: tuple(map(SectionStats, map(int, counts), *times))
            for name, (counts, *times) in zip(self._names, columns, strict=True)
        }
        return replace(self._bare_report, sections=sections)

    @cached_property
    def _bare_report(self) -> StragglerReport:
        """The report without the statistics of the sections."""
        return StragglerReport(
            unix_time=self.unix_time,
            world_size=self.world_size,
            log_interval=self._rows.log_interval,
            total_flops=self.total_flops,
            hosts=self._hosts,
            metrics=dict(zip(METRICS, map(tuple, self._metrics.tolist()), strict=True)),
            sections={},
            relative_scores=self._label_scores(relative_scores(self._medians)),
            individual_scores=self._label_scores(self._best_medians / self._medians),
            outliers=self._describe(
                find_outliers(self._kept, self._past.num_times, self._past.rule)
            ),
            local_sections=self._local_sections,
            ranks=self._rows.ranks,
            stragglers=self.stragglers,
            devices=self._devices,
            measuring=self.is_measuring,
        )

    @property
    def places(self) -> list[tuple[str, str]]:
        """Host and device of each rank, by rank."""
        order = range(self.world_size) if self._rows.order is None else self._rows.order.tolist()
        return [(self._hosts[index], self._devices[index]) for index in order]

    @property
    def section_names(self) -> tuple[str, ...]:
        """The sections of :meth:`by_rank`: all but ``"compute"``, which ``elapsed_ms`` shows."""
        return tuple(self._names[COMPUTE_KIND + 1 :])

    def by_rank(self) -> torch.Tensor:
        """Return float32 ``[7 + num_sections, world]``: the metrics, then ms per iteration."""
        sums = self._rows.matrix[:, SECTIONS_START + STATS_PER_SECTION + 1 :: STATS_PER_SECTION]
        values = torch.cat([self._metrics, sums.t() / max(self._rows.log_interval, 1)]).float()
        return values if self._rows.order is None else values[:, self._rows.order]

    @cached_property
    def extremes(self) -> dict[str, Extremes]:
        """The smallest and the largest value of each metric, with their ranks."""
        order = self._rows.order
        by_rank = self._metrics if order is None else self._metrics[:, order]
        return dict(zip(METRICS, row_extremes(by_rank), strict=True))

    @cached_property
    def stragglers(self) -> tuple[Outlier, ...]:
        """The ranks that are slow by the last reports, the worst first."""
        return self._describe(self._slow)

    def throughput_ends(self, num_ranks: int) -> ThroughputEnds:
        """See :meth:`StragglerReport.throughput_ends`."""
        return throughput_ends(self._metrics[-1].tolist(), self._rows.ranks, num_ranks)

    def data(self) -> _StragglerData:
        """Return the extremes, and the throughput of the ranks that have a value."""
        ends: dict[str, _ValueWithRank] = {}
        names = ("elapsed", "btime", "temp", "power", "util", "clock")  # all but the throughput
        for name, metric in zip(names, METRICS, strict=False):
            for side, value in zip(("min", "max"), self.extremes[metric], strict=True):
                ends[f"{side}_{name}"] = _ValueWithRank(*value, METRICS[metric])
        by_rank = zip(self._metrics[-1].tolist(), self._rows.ranks, strict=True)
        aflops = sorted((value, rank) for value, rank in by_rank if not math.isnan(value))
        return _StragglerData(
            **ends, aflops=[_ValueWithRank(value, rank, "TF") for value, rank in aflops]
        )

    def _describe(self, places: Places) -> tuple[Outlier, ...]:
        rows = self._rows
        by_row = {row: self._read_judged_row(row) for row in {row for row, _, _ in places}}
        outliers = []
        for row, index, z in places:
            values, median, scores = by_row[row]
            name, host, device = self._past.row_names[row], self._hosts[index], self._devices[index]
            numbers = values[index], median, z, scores[index]
            outliers.append(Outlier(name, rows.ranks[index], host, *numbers, device))
        return tuple(outliers)

    def _read_judged_row(self, row: int) -> tuple[list[float], float, list[float]]:
        """Return the last known values, their median and scores for a judged metric or section."""
        name = self._past.row_names[row]
        is_time = row < self._past.num_times
        values = self._last_times[row] if is_time else self._metrics[list(METRICS).index(name)]
        section = COMPUTE_KIND if name in METRICS else self._names.index(name)
        medians = self._last_medians[section]
        scores = relative_scores(medians).fmin(self._best_medians[section] / medians)
        return values.tolist(), row_medians(values.unsqueeze(0))[0], scores.tolist()

    def _label_scores(self, scores: torch.Tensor) -> dict[str, tuple[float, ...]]:
        return {
            name: tuple(by_rank)
            for kind, (name, by_rank) in enumerate(zip(self._names, scores.tolist(), strict=True))
            if kind != DATA_KIND  # a fetch that prefetching hides delays no rank
        }
