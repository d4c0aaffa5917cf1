"""A report over the gathered rows; what costs a Python object for each rank is made when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from mcore.observe.straggler.column_statistics import extremes
from mcore.observe.straggler.outliers import Outlier, OutlierRule, outliers_of
from mcore.observe.straggler.ranked_values import _StragglerData, _ValueWithRank
from mcore.observe.straggler.report import StragglerReport
from mcore.observe.straggler.rows import (
    ELAPSED,
    ETPT,
    LOG_INTERVAL,
    METRICS,
    SECTIONS_START,
    STATS_PER_SECTION,
    TOTAL_FLOPS,
)
from mcore.observe.straggler.scores import BestMedians, relative_scores
from mcore.observe.straggler.section_stats import SectionStats
from mcore.observe.straggler.sections import DATA

__all__ = ["GatheredReport", "straggler_data"]

_MEDIAN = 2  # of count, sum_ms, median_ms, max_ms


class GatheredReport(StragglerReport):
    """A :class:`StragglerReport` of one matrix.

    Args:
        matrix: The rows of all ranks in the group's order, ``[world, length]`` float64.
        unix_time: When it was made, in seconds since 1970.
        hosts: Host name of each row.
        ranks: The rank of each row.
        rank_ids: The same, int64 ``[world]``.
        names: Of the sections: ``"compute"``, ``"data"``, then the declared ones.
        best: The best medians so far; this report's are added.
        rule: When a rank stands out.
        local_sections: Sections that only this rank knows.
    """

    def __init__(
        self,
        matrix: torch.Tensor,
        *,
        unix_time: float,
        hosts: tuple[str, ...],
        ranks: tuple[int, ...],
        rank_ids: torch.Tensor,
        names: Sequence[str],
        best: BestMedians,
        rule: OutlierRule,
        local_sections: Mapping[str, SectionStats],
    ) -> None:
        deciding = matrix[ranks.index(0)].tolist()
        medians = matrix[:, SECTIONS_START + _MEDIAN :: STATS_PER_SECTION].t()
        scored = [number for number, name in enumerate(names) if name != DATA]
        medians = medians[scored].contiguous()
        medians = medians.where(medians > 0, torch.nan)
        # The dataclass is frozen; these are its fields that cost nothing.
        vars(self).update(
            unix_time=unix_time,
            world_size=len(ranks),
            log_interval=int(deciding[LOG_INTERVAL]),
            total_flops=deciding[TOTAL_FLOPS],
            hosts=hosts,
            ranks=ranks,
            local_sections=dict(local_sections),
            _matrix=matrix,
            _names=tuple(names),
            _scored_names=tuple(names[number] for number in scored),
            _rule=rule,
            _medians=medians,
            _best_medians=best.with_new(medians),
            _rank_ids=rank_ids,
        )

    _matrix: torch.Tensor
    _names: tuple[str, ...]
    _scored_names: tuple[str, ...]
    _rule: OutlierRule
    _medians: torch.Tensor
    _best_medians: torch.Tensor
    _rank_ids: torch.Tensor

    @cached_property
    def metrics(self) -> dict[str, tuple[float, ...]]:
        """By metric and rank."""
        return _tuples(METRICS, self._columns)

    @cached_property
    def sections(self) -> dict[str, tuple[SectionStats, ...]]:
        """By section and rank."""
        numbers = self._matrix[:, SECTIONS_START:]
        numbers = numbers.reshape(self.world_size, len(self._names), STATS_PER_SECTION)
        return {
            name: tuple(SectionStats(int(count), *times) for count, *times in by_rank)
            for name, by_rank in zip(self._names, numbers.transpose(0, 1).tolist(), strict=True)
        }

    @cached_property
    def relative_scores(self) -> dict[str, tuple[float, ...]]:
        """By section and rank."""
        return _tuples(self._scored_names, relative_scores(self._medians))

    @cached_property
    def individual_scores(self) -> dict[str, tuple[float, ...]]:
        """By section and rank."""
        return _tuples(self._scored_names, self._best_medians / self._medians)

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """The worst first."""
        return outliers_of(
            self._columns,
            self._medians,
            self._best_medians,
            names=self._scored_names,
            ranks=self.ranks,
            hosts=self.hosts,
            rule=self._rule,
        )

    @cached_property
    def _columns(self) -> torch.Tensor:
        return self._matrix[:, ELAPSED : ETPT + 1].t().contiguous()

    @cached_property
    def _all_extremes(self) -> dict[str, tuple[tuple[float, int], tuple[float, int]]]:
        return dict(zip(METRICS, extremes(self._columns, self._rank_ids), strict=True))

    def _extremes(self, metric: str) -> tuple[tuple[float, int], tuple[float, int]]:
        return self._all_extremes[metric]

    def _column(self, metric: str) -> torch.Tensor:
        return self._columns[list(METRICS).index(metric)]

    def _ranks_tensor(self) -> torch.Tensor:
        return self._rank_ids


def _tuples(
    names: Sequence[str] | Mapping[str, str], rows: torch.Tensor
) -> dict[str, tuple[float, ...]]:
    return {name: tuple(row) for name, row in zip(names, rows.tolist(), strict=True)}


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
