"""What one report found out about all ranks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from heapq import nlargest, nsmallest
from typing import Any

from mcore.observe.straggler.outliers import Outlier
from mcore.observe.straggler.prometheus import report_text
from mcore.observe.straggler.ranked_values import Extremes, _ValueWithRank, extremes_of
from mcore.observe.straggler.rows import METRICS
from mcore.observe.straggler.scores import below
from mcore.observe.straggler.section_stats import SectionStats

__all__ = ["StragglerReport"]


@dataclass(frozen=True)
class StragglerReport:
    """Metrics, statistics and scores of all ranks over one interval; equal on every rank.

    Tuples are indexed by the rank in the group; ``ranks`` has the number that each rank gave to
    ``configure``, which is the same for a job that passes its ranks. NaN is no data.

    Attributes:
        unix_time: When it was made, in seconds since 1970.
        world_size: The number of ranks.
        log_interval: Iterations since the last report, as rank 0 said.
        total_flops: Operations of the job in that time, as rank 0 said.
        hosts: Host name of each rank.
        metrics: ``elapsed_ms`` (compute ranges per iteration), ``data_ms`` (longest data range),
            ``temp_c``, ``power_w``, ``util_pct``, ``clock_mhz`` and ``etpt_tf``, by rank.
        sections: Statistics by section and rank; ``"compute"`` and ``"data"`` are built in.
        relative_scores: The fastest rank's median range time over the rank's own, from 0 to 1, by
            section and rank; ``"compute"`` and the declared sections.
        individual_scores: The rank's best median ever over its current one, likewise.
        outliers: Ranks that stand out, the worst first.
        local_sections: Sections that were timed here without being declared; of this rank alone.
        ranks: The number that each rank gave to ``configure``; empty means 0, 1, 2 and so on.

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

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.world_size)))

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
        smallest, largest = self._extremes(metric)
        unit = METRICS[metric]
        return _ValueWithRank(*smallest, unit), _ValueWithRank(*largest, unit)

    def throughput_ends(
        self, num_ranks: int
    ) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Return the ranks with the lowest and with the highest estimated throughput.

        Args:
            num_ranks: How many at each end; fewer where fewer ranks know theirs.

        Returns:
            Two lists of TFLOP/s and rank, both ascending, equal values by rank.
        """
        by_rank = zip(self.metrics["etpt_tf"], self.ranks, strict=True)
        known = [(value, rank) for value, rank in by_rank if math.isfinite(value)]
        return nsmallest(num_ranks, known), nlargest(num_ranks, known)[::-1]

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
            "relative": {
                name: below(scores, relative, self.ranks)
                for name, scores in self.relative_scores.items()
            },
            "individual": {
                name: below(scores, individual, self.ranks)
                for name, scores in self.individual_scores.items()
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, texts and numbers, with None for NaN."""
        fields = {name: getattr(self, name) for name in StragglerReport.__dataclass_fields__}
        plain: dict[str, Any] = _plain(fields)
        return plain

    def to_json(self) -> str:
        """Return everything as JSON, with null for NaN."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_prometheus(self) -> str:
        """Return the numbers of all ranks in Prometheus' text format 0.0.4."""
        return report_text(self)

    def _extremes(self, metric: str) -> Extremes:
        return extremes_of(self.metrics[metric], self.ranks)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (SectionStats, Outlier)):
        return _plain(asdict(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
