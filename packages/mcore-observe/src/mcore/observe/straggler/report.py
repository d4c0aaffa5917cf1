"""Findings of one report about all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from heapq import nlargest, nsmallest
from typing import Any, TypeAlias

import torch

from mcore.observe.straggler.exchange import (
    METRICS,
)
from mcore.observe.straggler.outliers import (
    Outlier,
)
from mcore.observe.straggler.prometheus import family, labels
from mcore.observe.straggler.ranges import SectionStats
from mcore.observe.straggler.statistics import (
    row_extremes,
    row_medians,
)

ThroughputEnds: TypeAlias = tuple[list[tuple[float, int]], list[tuple[float, int]]]

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

    ``<``, ``>``, ``<=`` and ``>=`` compare the values alone; ``==`` compares all three.

    Args:
        value: The number.
        rank: The rank.
        unit: Its unit, for the text.

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
    """Smallest and largest value of each metric over the ranks, with NaN and rank -1 for none.

    Attributes:
        min_elapsed: Time of the compute ranges per iteration, ms.
        max_elapsed: The same, of the slowest rank.
        min_btime: Longest data range, ms.
        max_btime: The same, of the slowest rank.
        min_temp: GPU temperature, C.
        max_temp: The same, of the hottest.
        min_power: GPU power, W.
        max_power: The same, of the highest.
        min_util: GPU utilisation, %.
        max_util: The same, of the busiest.
        min_clock: GPU clock, MHz.
        max_clock: The same, of the fastest.
        aflops: Estimated throughput of every rank, TFLOP/s, ascending; None where not asked for.

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
    """Metrics, statistics and scores of all ranks over one interval; identical on every rank.

    Tuples are indexed by the rank in the group; ``ranks`` has the number that each rank gave to
    ``configure``, which is the same for a job that passes its ranks. NaN means no data.

    Attributes:
        unix_time: When it was made, in seconds since 1970.
        world_size: The number of ranks.
        log_interval: Iterations since the last report, as given on rank 0.
        total_flops: Operations of the job in that time, as given on rank 0.
        hosts: Host name of each rank.
        metrics: ``elapsed_ms`` (compute ranges per iteration), ``data_ms`` (longest data range),
            ``temp_c``, ``power_w``, ``util_pct``, ``clock_mhz`` and ``etpt_tf``, by rank.
        sections: Statistics by section and rank; ``"compute"`` and ``"data"`` are built in.
        relative_scores: The fastest rank's median range time over the rank's own, from 0 to 1, by
            section and rank; ``"compute"`` and the declared sections.
        individual_scores: The rank's best median in the last 16 reports over its current one,
            likewise.
        outliers: Ranks that stand out in this report, the worst first.
        stragglers: Ranks that stand out in the last three reports together, and in two of them,
            the worst first; from the other ranks, or from their own past.
        local_sections: Sections that were timed here without being declared; of this rank alone.
        ranks: The number that each rank gave to ``configure``; empty means 0, 1, 2 and so on.
        devices: Device that each rank computes on, such as ``"cuda:3"``; empty means not known.

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

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.world_size)))
        if not self.devices:
            object.__setattr__(self, "devices", ("",) * self.world_size)

    def __eq__(self, other: object) -> bool:
        """Compare all fields; NaN, which is no data, equals NaN."""
        if not isinstance(other, StragglerReport):
            return NotImplemented
        is_equal: bool = _plain(asdict(self), math.isnan) == _plain(asdict(other), math.isnan)
        return is_equal

    def min_max(self, metric: str) -> tuple[_ValueWithRank, _ValueWithRank]:
        """Return the smallest and the largest value of a metric, with the lowest rank that has it.

        Args:
            metric: A key of ``metrics``.

        Returns:
            ``(smallest, largest)``; NaN with rank -1 where no rank knows a value.

        Raises:
            ValueError: No such metric.
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
            num_ranks: How many at each end; fewer where fewer ranks know theirs.

        Returns:
            Two lists of TFLOP/s and rank, both ascending, equal values by rank.
        """
        return throughput_ends(self.metrics["etpt_tf"], self.ranks, num_ranks)

    def identify_stragglers(
        self, relative: float = 0.75, individual: float = 0.75
    ) -> dict[str, dict[str, tuple[int, ...]]]:
        """List the ranks whose scores are too low.

        Args:
            relative: Threshold of the relative scores: 0.75 is a third slower than the fastest.
            individual: Threshold of the individual scores.

        Returns:
            Under ``"relative"`` and ``"individual"``, the ranks below the threshold by section. A
            rank without data is never one.
        """
        return {
            "relative": _below(self.relative_scores, relative, self.ranks),
            "individual": _below(self.individual_scores, individual, self.ranks),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, with None for NaN."""
        plain: dict[str, Any] = _plain(asdict(self), lambda value: not math.isfinite(value))
        return plain

    def to_json(self) -> str:
        """Return everything as JSON, with null for NaN."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_prometheus(self, *, all_ranks: bool = True) -> str:
        """Return the numbers of all ranks in Prometheus' text format 0.0.4.

        Args:
            all_ranks: False gives the sections' least, median and most over the ranks, with the
                label ``of``, rather than each rank's: 4,096 ranks fill megabytes otherwise.
        """
        by_rank = zip(self.ranks, self.hosts, strict=True)
        ranks = [labels(rank=rank, host=host) for rank, host in by_rank]
        families = [
            family(name, "gauge", text, _scaled(ranks, self.metrics[metric], factor))
            for metric, (name, factor, text) in _GAUGES.items()
            if metric in self.metrics
        ]
        families += self._section_families(ranks if all_ranks else None)
        for name, found, text in (
            ("outlier", self.outliers, "1 for each rank and metric that stands out."),
            ("straggler", self.stragglers, "1 for each that has stood out in several reports."),
        ):
            samples = [(labels(rank=one.rank, metric=one.metric), 1) for one in found]
            families.append(family(name, "gauge", text, samples))
        return "".join(families)

    def _section_families(self, ranks: Sequence[str] | None) -> Iterable[str]:
        sums = {name: [each.sum_ms for each in stats] for name, stats in self.sections.items()}
        per_iteration = 1e-3 / max(self.log_interval, 1)
        relative, individual = self.relative_scores, self.individual_scores
        for name, text, sections, factor in (
            ("section_seconds", "Time of the section per iteration.", sums, per_iteration),
            ("relative_score", "Median time of the fastest rank over own.", relative, 1.0),
            ("individual_score", "Own best median of late over the current one.", individual, 1.0),
        ):
            samples: list[tuple[str, float]] = []
            for section, values in sections.items():
                label = labels(section=section)
                of_each, shown = (
                    (_ENDS, _ends_and_median(values)) if ranks is None else (ranks, values)
                )
                samples += _scaled([f"{each},{label}" for each in of_each], shown, factor)
            yield family(name, "gauge", text, samples)


def throughput_ends(
    values: Sequence[float], ranks: Sequence[int], num_ranks: int
) -> ThroughputEnds:
    """Return the ``num_ranks`` ranks with the smallest values and those with the largest."""
    by_rank = zip(values, ranks, strict=True)
    known = [(value, rank) for value, rank in by_rank if math.isfinite(value)]
    return nsmallest(num_ranks, known), nlargest(num_ranks, known)[::-1]


def _below(
    scores: Mapping[str, Sequence[float]], threshold: float, ranks: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose score is below a threshold, by section; never those without data."""
    return {
        name: tuple(rank for rank, score in zip(ranks, by_rank, strict=True) if score < threshold)
        for name, by_rank in scores.items()
    }


def _scaled(
    of_samples: Sequence[str], values: Sequence[float], factor: float
) -> Iterable[tuple[str, float]]:
    return zip(of_samples, (value * factor for value in values), strict=True)


_ENDS = [labels(of=end) for end in ("min", "median", "max")]


def _ends_and_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the smallest value, the median and the largest; NaN where all are."""
    rows = torch.tensor([values], dtype=torch.float64)
    [((smallest, _), (largest, _))] = row_extremes(rows)
    return smallest, row_medians(rows)[0], largest


def _plain(value: Any, is_missing: Callable[[float], bool]) -> Any:
    """Return a value with lists for tuples and None for the numbers that are missing."""
    if isinstance(value, dict):
        return {key: _plain(item, is_missing) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item, is_missing) for item in value]
    if isinstance(value, float) and is_missing(value):
        return None
    return value
