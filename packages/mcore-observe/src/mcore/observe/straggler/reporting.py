"""Makes reports: what this rank says, what all ranks said, and what follows from it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from mcore.observe.straggler.exchange import Exchange
from mcore.observe.straggler.gathered_report import GatheredReport
from mcore.observe.straggler.gathered_rows import GatheredRows
from mcore.observe.straggler.outliers import outlier_lines
from mcore.observe.straggler.report import StragglerReport
from mcore.observe.straggler.report_lines import report_lines
from mcore.observe.straggler.rows import (
    ENABLED,
    METRICS,
    RowHeader,
    encode_row,
    etpt_tf,
)
from mcore.observe.straggler.scores import BestMedians
from mcore.observe.straggler.section_stats import SectionStats
from mcore.observe.straggler.settings import Settings
from mcore.observe.straggler.telemetry import Reading
from mcore.observe.straggler.timing import COMPUTE_KIND, DATA_KIND

__all__ = ["UNKNOWN_METRICS", "Reporter"]

logger = logging.getLogger("mcore.observe.straggler")

UNKNOWN_METRICS = (math.nan,) * len(METRICS)

_MAX_NAMED_RANKS = 16


class Reporter:
    """Talks to the other ranks for the detector.

    Args:
        settings: What the detector was configured with.
        exchange: The ranks that report together.
        telemetry: Reads the GPU.
    """

    def __init__(
        self, settings: Settings, exchange: Exchange, telemetry: Callable[[], Reading]
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self.telemetry = telemetry
        self._names = settings.names
        self._sections_hash = settings.sections_hash
        self._best = BestMedians()

    def metrics_of(
        self, stats: Mapping[int, SectionStats], total_flops: float, log_interval: int
    ) -> tuple[float, ...]:
        """Return this rank's metrics in the order of ``METRICS``; reads the GPU.

        Args:
            stats: What was timed, by kind.
            total_flops: Operations of the job in that time.
            log_interval: Iterations in that time, at least 1.
        """
        compute, data = stats.get(COMPUTE_KIND), stats.get(DATA_KIND)
        elapsed_ms = 0.0 if compute is None else compute.sum_ms
        throughput = etpt_tf(
            total_flops, elapsed_ms, world=self._settings.world, amp=self._settings.amp
        )
        return (
            math.nan if compute is None else elapsed_ms / log_interval,
            math.nan if data is None else data.max_ms,
            *self.telemetry(),
            throughput,
        )

    def gather(
        self,
        *,
        enabled: bool,
        wanted: bool,
        metrics: Sequence[float] = UNKNOWN_METRICS,
        stats: Mapping[int, SectionStats] | None = None,
        total_flops: float = 0.0,
        log_interval: int = 0,
        dropped: int = 0,
    ) -> GatheredRows:
        """Tell the other ranks and hear them: the collective of a report.

        One all-gather over the group, and one of names at the first call; every rank calls it.

        Args:
            enabled: Whether this rank times ranges.
            wanted: The state that it wants.
            metrics: Seven numbers in the order of ``METRICS``.
            stats: What was timed, by kind; None for nothing.
            total_flops: Operations of the job in that time.
            log_interval: Iterations in that time.
            dropped: Ranges timed by the host alone.

        Returns:
            What all ranks said, on every rank.

        Raises:
            RuntimeError: As :meth:`Exchange.introduce` and :meth:`Exchange.gather`.
        """
        rank = self._settings.rank
        self._exchange.introduce(rank=rank, sections_hash=self._sections_hash)
        header = RowHeader(
            self._sections_hash,
            enabled=enabled,
            wanted=wanted,
            idle=COMPUTE_KIND not in (stats or {}),
            metrics=metrics,
            log_interval=log_interval,
            total_flops=total_flops,
            dropped=dropped,
        )
        row = encode_row(header, stats or {}, len(self._names))
        return self._exchange.gather(row, rank)

    def new_report(
        self,
        said: GatheredRows,
        local_sections: Mapping[str, SectionStats],
        *,
        remember: bool = True,
    ) -> GatheredReport:
        """Return a report of what was said. No communication.

        Args:
            said: What all ranks said.
            local_sections: Sections that only this rank knows.
            remember: Take the medians into account for later individual scores.
        """
        return GatheredReport(
            said,
            unix_time=time.time(),
            hosts=self._exchange.hosts,
            names=self._names,
            best=self._best if remember else BestMedians(),
            rule=self._settings.rule,
            local_sections=local_sections,
        )

    def log(self, report: StragglerReport) -> bool:
        """Log a report where it has a throughput; return whether it has."""
        if not report.total_flops > 0:
            return False
        if logger.isEnabledFor(logging.INFO):
            for line in report_lines(report, num_ranks=self._settings.mmcnt):
                logger.info("%s", line)
        if logger.isEnabledFor(logging.WARNING):
            for line in outlier_lines(report.outliers):
                logger.warning("%s", line)
        return True

    def log_switch(self, said: GatheredRows) -> None:
        """Log that ranks disagree on the state, and that it changes."""
        differing = said.ranks_unlike(ENABLED)
        if differing:
            logger.warning(
                "straggler: rank 0 is %s and %d other ranks are not (%s); all take the state of "
                "rank 0",
                _word(said.is_on),
                len(differing),
                _shortened(differing),
            )
        if said.wanted != said.is_on:
            logger.info("Toggling StragglerDetector State %s", _word(said.wanted))


def _word(enabled: bool) -> str:
    return "ON" if enabled else "OFF"


def _shortened(ranks: Sequence[int]) -> str:
    text = ", ".join(str(rank) for rank in ranks[:_MAX_NAMED_RANKS])
    return f"{text} ..." if len(ranks) > _MAX_NAMED_RANKS else text
