"""Comparison of the ranks in one exchange, with what the last reports found."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from mcore.observe.straggler.exchange import (
    METRICS,
    SECTIONS_START,
    STATS_PER_SECTION,
    GatheredRows,
)
from mcore.observe.straggler.outliers import (
    NUM_REPORTS,
    Found,
    Judged,
    Outlier,
    OutlierRule,
    find_outliers,
)
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, SectionStats
from mcore.observe.straggler.report import (
    StragglerReport,
    ThroughputEnds,
    _StragglerData,
    _ValueWithRank,
    throughput_ends,
)
from mcore.observe.straggler.statistics import (
    Extremes,
    relative_scores,
    row_extremes,
    row_medians,
)

_MEDIANS = slice(SECTIONS_START + 2, None, STATS_PER_SECTION)  # of count, sum, median, max
_NUM_MEDIANS = 16


class Past:
    """What the last reports have found, for the next one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.judged = Judged(names)
        self._medians: deque[torch.Tensor] = deque(maxlen=_NUM_MEDIANS)

    def best_medians(self, medians: torch.Tensor) -> torch.Tensor:
        """Take in the medians of a report; return each rank's best of the last 16 reports."""
        self._medians.append(medians)
        return functools.reduce(torch.fmin, self._medians)


class RankComparison:
    """The rows of one exchange as a report; what nobody asks for is not computed.

    ``names`` are those of all sections. ``history`` has what :meth:`Judged.add` returned for this
    report, ``num_times`` of it times; ``best_medians`` include this report's.
    """

    def __init__(
        self,
        rows: GatheredRows,
        *,
        unix_time: float,
        hosts: tuple[str, ...],
        names: Sequence[str],
        rule: OutlierRule,
        past: Past,
        local_sections: Mapping[str, SectionStats] | None = None,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.unix_time = unix_time
        self.world_size = len(rows.ranks)
        self.total_flops = rows.total_flops
        self._rows = rows
        self._hosts, self._devices = hosts, devices or ("",) * self.world_size
        self._names = names
        self._rule = rule
        self._local_sections = dict(local_sections or {})
        self._metrics = rows.metrics()
        medians = rows.matrix[:, _MEDIANS].t().contiguous()
        self._medians = medians.where(medians > 0, torch.nan)
        self._judged_names, self._num_times = past.judged.names, past.judged.num_times
        self._history = past.judged.add(rows)
        self._best_medians = past.best_medians(self._medians)

    @cached_property
    def report(self) -> StragglerReport:
        """Everything."""
        individual = self._best_medians / self._medians
        return StragglerReport(
            unix_time=self.unix_time,
            world_size=self.world_size,
            log_interval=self._rows.log_interval,
            total_flops=self.total_flops,
            hosts=self._hosts,
            metrics=dict(zip(METRICS, map(tuple, self._metrics.tolist()), strict=True)),
            sections=self._sections(),
            relative_scores=self._by_section(relative_scores(self._medians)),
            individual_scores=self._by_section(individual),
            outliers=self.outliers,
            local_sections=self._local_sections,
            ranks=self._rows.ranks,
            stragglers=self.stragglers,
            devices=self._devices,
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
        per_iteration = sums.t() / max(self._rows.log_interval, 1)
        values = torch.cat([self._metrics, per_iteration]).float()
        return values if self._rows.order is None else values[:, self._rows.order]

    @cached_property
    def extremes(self) -> dict[str, Extremes]:
        """The smallest and the largest value of each metric, with their ranks."""
        order = self._rows.order
        by_rank = self._metrics if order is None else self._metrics[:, order]
        return dict(zip(METRICS, row_extremes(by_rank), strict=True))

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """The ranks that stand out in this report, the worst first."""
        return self._named(1)

    @cached_property
    def stragglers(self) -> tuple[Outlier, ...]:
        """The ranks that stand out in the last reports, the worst first."""
        return self._named(NUM_REPORTS)

    def _named(self, num_reports: int) -> tuple[Outlier, ...]:
        found = find_outliers(self._history, self._num_times, self._rule, num_reports=num_reports)
        of_rows = {row: self._of_row(row) for row in {one.row for one in found}}
        return tuple(self._outlier(one, *of_rows[one.row]) for one in found)

    def _of_row(self, row: int) -> tuple[list[float], float, list[float]]:
        """Return values, their median and scores of the ranks for what is judged in a row."""
        name = self._judged_names[row]
        if name in METRICS:
            values, section = self._metrics[list(METRICS).index(name)], COMPUTE_KIND
        else:
            section = self._names.index(name)
            sums = self._rows.matrix[:, SECTIONS_START + STATS_PER_SECTION * section + 1]
            values = sums / max(self._rows.log_interval, 1)
        medians = self._medians[section]
        scores = relative_scores(medians).fmin(self._best_medians[section] / medians)
        return values.tolist(), row_medians(values.unsqueeze(0))[0], scores.tolist()

    def _outlier(
        self, found: Found, values: list[float], median: float, scores: list[float]
    ) -> Outlier:
        index = found.index
        return Outlier(
            self._judged_names[found.row],
            self._rows.ranks[index],
            self._hosts[index],
            values[index],
            median,
            found.z,
            scores[index],
            self._devices[index],
        )

    def throughput_ends(self, num_ranks: int) -> ThroughputEnds:
        """See :meth:`StragglerReport.throughput_ends`."""
        return throughput_ends(self._metrics[-1].tolist(), self._rows.ranks, num_ranks)

    def data(self) -> _StragglerData:
        """Return the extremes, and the throughput of the ranks that know theirs."""
        ends: dict[str, _ValueWithRank] = {}
        for name, metric in (
            ("elapsed", "elapsed_ms"),
            ("btime", "data_ms"),
            ("temp", "temp_c"),
            ("power", "power_w"),
            ("util", "util_pct"),
            ("clock", "clock_mhz"),
        ):
            for side, value in zip(("min", "max"), self.extremes[metric], strict=True):
                ends[f"{side}_{name}"] = _ValueWithRank(*value, METRICS[metric])
        by_rank = zip(self._metrics[-1].tolist(), self._rows.ranks, strict=True)
        aflops = sorted((value, rank) for value, rank in by_rank if not math.isnan(value))
        return _StragglerData(
            **ends, aflops=[_ValueWithRank(value, rank, "TF") for value, rank in aflops]
        )

    def _sections(self) -> dict[str, tuple[SectionStats, ...]]:
        numbers = self._rows.matrix[:, SECTIONS_START:]
        numbers = numbers.reshape(self.world_size, len(self._names), STATS_PER_SECTION)
        return {
            name: tuple(SectionStats(int(count), *times) for count, *times in by_rank)
            for name, by_rank in zip(self._names, numbers.transpose(0, 1).tolist(), strict=True)
        }

    def _by_section(self, scores: torch.Tensor) -> dict[str, tuple[float, ...]]:
        return {
            name: tuple(by_rank)
            for kind, (name, by_rank) in enumerate(zip(self._names, scores.tolist(), strict=True))
            if kind != DATA_KIND  # what prefetching hides slows nobody down
        }
