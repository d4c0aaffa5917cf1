"""A report over the gathered rows; what nobody asks for is not worked out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from mcore.observe.straggler.few_ranks import ListedMedians, ListedMetrics
from mcore.observe.straggler.gathered_rows import GatheredRows
from mcore.observe.straggler.many_ranks import TensorMedians, TensorMetrics
from mcore.observe.straggler.outliers import (
    MIN_WORLD_FOR_Z,
    Outlier,
    OutlierRule,
    outliers_by_score,
    outliers_by_z,
)
from mcore.observe.straggler.rank_numbers import Medians, Metrics
from mcore.observe.straggler.ranked_values import Extremes, _StragglerData, _ValueWithRank
from mcore.observe.straggler.report import StragglerReport
from mcore.observe.straggler.rows import (
    ELAPSED,
    ETPT,
    METRICS,
    SECTIONS_START,
    STATS_PER_SECTION,
)
from mcore.observe.straggler.scores import BestMedians
from mcore.observe.straggler.section_stats import SectionStats
from mcore.observe.straggler.timing import COMPUTE_KIND, DATA_KIND

__all__ = ["GatheredReport", "straggler_data"]

_METRICS = slice(ELAPSED, ETPT + 1)
_MEDIANS = slice(SECTIONS_START + 2, None, STATS_PER_SECTION)  # of count, sum, median, max


class GatheredReport(StragglerReport):
    """A :class:`StragglerReport` of the rows of one exchange.

    Args:
        rows: What all ranks said.
        unix_time: When it was made, in seconds since 1970.
        hosts: Host name of each row.
        names: Of the sections: ``"compute"``, ``"data"``, then the declared ones.
        best: The best medians so far; this report's are added.
        rule: When a rank stands out.
        local_sections: Sections that only this rank knows.
    """

    def __init__(
        self,
        rows: GatheredRows,
        *,
        unix_time: float,
        hosts: tuple[str, ...],
        names: tuple[str, ...],
        best: BestMedians,
        rule: OutlierRule,
        local_sections: Mapping[str, SectionStats],
    ) -> None:
        medians = _medians_of(rows)
        # The dataclass is frozen; these are its fields that cost nothing.
        vars(self).update(
            unix_time=unix_time,
            world_size=len(rows.ranks),
            log_interval=rows.log_interval,
            total_flops=rows.total_flops,
            hosts=hosts,
            ranks=rows.ranks,
            local_sections=dict(local_sections),
            _rows=rows,
            _names=names,
            _rule=rule,
            _medians=medians,
            _best_medians=best.with_new(medians),
        )

    _rows: GatheredRows
    _names: tuple[str, ...]
    _rule: OutlierRule
    _medians: Medians
    _best_medians: Medians

    @cached_property
    def metrics(self) -> dict[str, tuple[float, ...]]:
        """By metric and rank."""
        return {metric: tuple(self._metrics.values(metric)) for metric in METRICS}

    @cached_property
    def sections(self) -> dict[str, tuple[SectionStats, ...]]:
        """By section and rank."""
        numbers = self._rows.matrix[:, SECTIONS_START:]
        numbers = numbers.reshape(self.world_size, len(self._names), STATS_PER_SECTION)
        return {
            name: tuple(SectionStats(int(count), *times) for count, *times in by_rank)
            for name, by_rank in zip(self._names, numbers.transpose(0, 1).tolist(), strict=True)
        }

    @cached_property
    def relative_scores(self) -> dict[str, tuple[float, ...]]:
        """By section and rank."""
        return {name: tuple(self._medians.relative(number)) for number, name in self._scored}

    @cached_property
    def individual_scores(self) -> dict[str, tuple[float, ...]]:
        """By section and rank."""
        return {
            name: tuple(self._medians.individual(self._best_medians, number))
            for number, name in self._scored
        }

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """The worst first."""
        if self.world_size >= MIN_WORLD_FOR_Z:
            return outliers_by_z(
                self._metrics,
                lambda: self._medians.relative(COMPUTE_KIND),
                ranks=self.ranks,
                hosts=self.hosts,
                min_z=self._rule.z,
            )
        medians, best = self._medians, self._best_medians
        sections = (
            (name, medians.of_section(number), medians.relative(number),
             medians.individual(best, number))
            for number, name in self._scored
        )  # fmt: skip
        return outliers_by_score(sections, ranks=self.ranks, hosts=self.hosts, rule=self._rule)

    @cached_property
    def _metrics(self) -> Metrics:
        rows = self._rows
        if rows.lists is not None:
            return ListedMetrics(rows.columns(_METRICS), rows.ranks)
        return TensorMetrics(rows.matrix[:, _METRICS].t().contiguous(), rows.rank_ids)

    def _extremes(self, metric: str) -> Extremes:
        return self._metrics.extremes(metric)

    @property
    def _scored(self) -> list[tuple[int, str]]:
        """Number and name of the sections with scores: what prefetching hides slows nobody down."""
        return [(number, name) for number, name in enumerate(self._names) if number != DATA_KIND]


def _medians_of(rows: GatheredRows) -> Medians:
    if rows.lists is not None:
        return ListedMedians(rows.columns(_MEDIANS))
    return TensorMedians(rows.matrix[:, _MEDIANS].t().contiguous())


def straggler_data(report: StragglerReport) -> _StragglerData:
    """Return the extremes of a report, and the throughput of every rank.

    Args:
        report: The report.

    Returns:
        The extremes; ranks whose throughput is unknown are left out of ``aflops``.
    """
    extremes = {
        f"{side}_{name}": value
        for name, metric in (
            ("elapsed", "elapsed_ms"),
            ("btime", "data_ms"),
            ("temp", "temp_c"),
            ("power", "power_w"),
            ("util", "util_pct"),
            ("clock", "clock_mhz"),
        )
        for side, value in zip(("min", "max"), report.min_max(metric), strict=True)
    }
    by_rank = zip(report.metrics["etpt_tf"], report.ranks, strict=True)
    aflops = sorted((value, rank) for value, rank in by_rank if value == value)
    return _StragglerData(
        **extremes, aflops=[_ValueWithRank(value, rank, "TF") for value, rank in aflops]
    )
