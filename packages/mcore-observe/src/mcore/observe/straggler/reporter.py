"""Makes reports: this rank's row, the comparison of all rows, and the log lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from mcore.observe.straggler.exchange import (
    ENABLED,
    METRICS,
    UNKNOWN_METRICS,
    Exchange,
    GatheredRows,
)
from mcore.observe.straggler.outliers import PastReports, outlier_lines
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, SectionStats
from mcore.observe.straggler.report import RankComparison
from mcore.observe.straggler.settings import StragglerSettings
from mcore.observe.straggler.telemetry import Reading
from mcore.observe.straggler.verdict import OutlierRule

logger = logging.getLogger("mcore.observe.straggler")

_MAX_NAMED_RANKS = 16
_MANY_REPORTS = 32  # without a verdict
_FIRST_STEPS = 16  # before the first report of report_if_due()

# Label and metric of the fields of the first line. Other tools parse it: keep names and order.
_PRINTED = (
    ("Rtt", "elapsed_ms"),
    ("Pwr", "power_w"),
    ("Tmp", "temp_c"),
    ("Utl", "util_pct"),
    ("Clk", "clock_mhz"),
    ("DRtt", "data_ms"),
    ("Etpt", "etpt_tf"),
)


class Reporter:
    """Makes the reports: metrics of this rank, comparison with others and the past, log lines."""

    def __init__(
        self,
        settings: StragglerSettings,
        names: Sequence[str],
        exchange: Exchange,
        telemetry: Callable[[], Reading],
    ) -> None:
        self.exchange, self.telemetry = exchange, telemetry
        self.pace = Pace(settings.report_every_s)
        self._settings, self._names = settings, names
        self._rule = OutlierRule(
            settings.z_threshold, settings.relative_threshold, settings.individual_threshold
        )
        self._past: PastReports | None = None
        self._num_measuring = 0
        self._is_measuring = True

    def report(
        self,
        stats: Mapping[int, SectionStats],
        local_sections: Mapping[str, SectionStats],
        *,
        enabled: bool,
        wanted: bool,
        total_flops: float,
        log_interval: int,
        dropped: int,
    ) -> tuple[GatheredRows, RankComparison | None]:
        """Exchange rows, and compare them if rank 0 is on and passes an interval.

        Every rank calls it. Reads the GPU of a rank that is on and passes an interval.
        """
        metrics = UNKNOWN_METRICS
        if enabled and log_interval > 0:
            compute, data = stats.get(COMPUTE_KIND), stats.get(DATA_KIND)
            elapsed_ms = 0.0 if compute is None else compute.sum_ms
            metrics = (
                math.nan if compute is None else elapsed_ms / log_interval,
                math.nan if data is None else data.max_ms,
                *self.telemetry(),
                etpt_tf(
                    total_flops, elapsed_ms, world=self._settings.world, amp=self._settings.amp
                ),
            )
        rows = self.exchange.gather(
            stats,
            enabled=enabled,
            wanted=wanted,
            metrics=metrics,
            total_flops=total_flops,
            log_interval=log_interval,
            dropped=dropped,
            next_interval=self.pace.wanted_interval(is_measuring=self._is_measuring),
        )
        self.pace.restart(rows.next_interval())
        comparison = self.compare(rows, local_sections) if rows.has_interval else None
        self._is_measuring = comparison is not None and comparison.is_measuring
        return rows, comparison

    def compare(
        self, rows: GatheredRows, local_sections: Mapping[str, SectionStats]
    ) -> RankComparison:
        """Compare the rows of all ranks, and keep those of an interval. No communication."""
        past = self._past
        if past is None or not rows.has_interval:
            past = PastReports(self._names, rule=self._rule, peers=self.exchange.peers)
        if rows.has_interval:
            self._past = past
        return RankComparison(
            rows,
            unix_time=time.time(),
            hosts=self.exchange.hosts,
            devices=self.exchange.devices,
            names=self._names,
            past=past,
            local_sections=local_sections,
        )

    def log(self, comparison: RankComparison) -> bool:
        """Log the slow ranks, and the report if it has a throughput. Return whether it has."""
        has_throughput = comparison.total_flops > 0
        if has_throughput and logger.isEnabledFor(logging.INFO):
            for line in report_lines(comparison, num_ranks=self._settings.mmcnt):
                logger.info("%s", line)
        if logger.isEnabledFor(logging.WARNING):
            for line in outlier_lines(comparison.stragglers):
                logger.warning("%s", line)
        self._num_measuring += comparison.is_measuring
        if comparison.is_measuring and self._num_measuring == _MANY_REPORTS:
            logger.warning(
                "straggler: no rank can be judged after %d reports, because too few of them have "
                "times. Lower sample_every, report less often, or time the steps of all ranks",
                self._num_measuring,
            )
        return has_throughput

    def log_switch(self, rows: GatheredRows) -> None:
        """Log if ranks disagree on the state, and if it changes."""
        differing = rows.ranks_unlike(ENABLED)
        if differing:
            named = ", ".join(str(rank) for rank in differing[:_MAX_NAMED_RANKS])
            logger.warning(
                "straggler: rank 0 is %s and %d other ranks are not (%s); all switch to the "
                "state of rank 0",
                _name_state(rows.is_on),
                len(differing),
                f"{named} ..." if len(differing) > _MAX_NAMED_RANKS else named,
            )
        if rows.wanted != rows.is_on:
            logger.info("Toggling StragglerDetector State %s", _name_state(rows.wanted))


def report_lines(comparison: RankComparison, *, num_ranks: int) -> list[str]:
    """Return the lines for a log: one, and two more with ``num_ranks`` ranks at each end.

    The two lines are left out if ``num_ranks`` is 1 or includes all ranks.
    """
    fields = [time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(comparison.unix_time))]
    for label, metric in _PRINTED:
        unit = METRICS[metric]
        (smallest, of_smallest), (largest, of_largest) = comparison.extremes[metric]
        fields.append(f"Mn{label}/Rnk: {smallest:.2f}{unit}/{of_smallest}")
        fields.append(f"Mx{label}/Rnk: {largest:.2f}{unit}/{of_largest}")
    lines = [" | ".join(fields)]
    if 1 < num_ranks < comparison.world_size:
        lowest, highest = comparison.throughput_ends(num_ranks)
        lines.append(f"^^^^ Bottom {num_ranks} Ranks with lowest  Etpt(TF): {_list_ranks(lowest)}")
        lines.append(f"^^^^ Top    {num_ranks} Ranks with highest Etpt(TF): {_list_ranks(highest)}")
    return lines


def etpt_tf(total_flops: float, elapsed_ms: float, *, world: int, amp: float) -> float:
    """Return the estimated throughput of one rank in TFLOP/s, 0.0 if no range was timed.

    It is the rank's share of the job's operations, over the time of its compute ranges multiplied
    by ``amp``: 3 if only the forward pass is timed.
    """
    # Milliseconds and TFLOP: 1e12 / 1e3.
    return total_flops / (elapsed_ms * 1e9 * world * amp) if elapsed_ms > 0 else 0.0


def _list_ranks(values: list[tuple[float, int]]) -> str:
    return " ".join(f"{value:.2f}/{rank}," for value, rank in values)


def _name_state(enabled: bool) -> str:
    return "ON" if enabled else "OFF"


class Pace:
    """Converts seconds between reports to a number of steps, on which all ranks agree.

    The first report is after 16 steps, from which the time of a step is measured.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._interval = _FIRST_STEPS
        self._began = time.monotonic()
        self.steps, self.flops = 0, 0.0

    def step(self, flops: float) -> bool:
        """Count a step and its operations. Return whether a report is due."""
        self.steps += 1
        self.flops += flops
        return self.steps >= self._interval

    def wanted_interval(self, *, is_measuring: bool) -> int:
        """Return the number of steps that this rank makes in the time between reports.

        The time is a tenth, and at least 16 steps, while the noise is measured.
        """
        took_s = time.monotonic() - self._began
        if took_s <= 0:
            return _FIRST_STEPS
        steps = max(1, round(self.steps * self._every_s / took_s))
        return min(steps, max(_FIRST_STEPS, steps // 10)) if is_measuring else steps

    def restart(self, interval: int) -> None:
        """Start to count the agreed number of steps."""
        self._interval = max(1, interval)
        self._began = time.monotonic()
        self.steps, self.flops = 0, 0.0
