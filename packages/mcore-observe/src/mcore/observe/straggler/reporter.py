"""The making of reports: this rank's row, the comparison of all rows, and the log lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from mcore.observe.straggler.comparison import Past, RankComparison
from mcore.observe.straggler.exchange import (
    ENABLED,
    METRICS,
    UNKNOWN_METRICS,
    Exchange,
    GatheredRows,
    encode_row,
)
from mcore.observe.straggler.outliers import OutlierRule, outlier_lines
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, SectionStats
from mcore.observe.straggler.sections import section_hash
from mcore.observe.straggler.telemetry import Reading

logger = logging.getLogger("mcore.observe.straggler")

_MAX_NAMED_RANKS = 16
_FIRST_STEPS = 16  # before the first report by the clock

# What the first line prints, in this order: label and metric. Other tools read these lines.
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
    """Talks to the other ranks for the detector, and remembers what they told."""

    def __init__(
        self,
        exchange: Exchange,
        telemetry: Callable[[], Reading],
        *,
        world: int,
        rank: int,
        amp: float,
        num_listed: int,
        names: Sequence[str],
        rule: OutlierRule,
    ) -> None:
        self._exchange = exchange
        self.telemetry = telemetry
        self._world, self._rank, self._amp = world, rank, amp
        self._num_listed = num_listed
        self._names = names
        self._sections_hash = section_hash(names)
        self._rule = rule
        self._past = Past(names)

    def metrics_of(
        self, stats: Mapping[int, SectionStats], total_flops: float, log_interval: int
    ) -> tuple[float, ...]:
        """Return this rank's metrics in the order of ``METRICS``; reads the GPU."""
        compute, data = stats.get(COMPUTE_KIND), stats.get(DATA_KIND)
        elapsed_ms = 0.0 if compute is None else compute.sum_ms
        return (
            math.nan if compute is None else elapsed_ms / log_interval,
            math.nan if data is None else data.max_ms,
            *self.telemetry(),
            etpt_tf(total_flops, elapsed_ms, world=self._world, amp=self._amp),
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
        next_interval: int = 0,
    ) -> GatheredRows:
        """Exchange rows with the other ranks: the collective of a report.

        One all-gather over the group, and one of names at the first call; every rank calls it.
        """
        self._exchange.introduce(rank=self._rank, sections_hash=self._sections_hash)
        row = encode_row(
            self._sections_hash,
            stats or {},
            len(self._names),
            enabled=enabled,
            wanted=wanted,
            metrics=metrics,
            log_interval=log_interval,
            total_flops=total_flops,
            dropped=dropped,
            next_interval=next_interval,
        )
        return self._exchange.gather(row, self._rank)

    def compare(
        self, rows: GatheredRows, local_sections: Mapping[str, SectionStats]
    ) -> RankComparison:
        """Compare the rows of all ranks. No communication."""
        return RankComparison(
            rows,
            unix_time=time.time(),
            hosts=self._exchange.hosts,
            devices=self._exchange.devices,
            names=self._names,
            rule=self._rule,
            past=self._past,
            local_sections=local_sections,
        )

    def log(self, found: RankComparison) -> bool:
        """Log the slow ranks, and a report if it has a throughput; return whether it does."""
        has_throughput = found.total_flops > 0
        if has_throughput and logger.isEnabledFor(logging.INFO):
            for line in report_lines(found, num_ranks=self._num_listed):
                logger.info("%s", line)
        if logger.isEnabledFor(logging.WARNING):
            for line in outlier_lines(found.stragglers):
                logger.warning("%s", line)
        return has_throughput

    def log_switch(self, rows: GatheredRows) -> None:
        """Log that ranks disagree on the state, and that it changes."""
        differing = rows.ranks_unlike(ENABLED)
        if differing:
            named = ", ".join(str(rank) for rank in differing[:_MAX_NAMED_RANKS])
            logger.warning(
                "straggler: rank 0 is %s and %d other ranks are not (%s); all take the state of "
                "rank 0",
                _word(rows.is_on),
                len(differing),
                f"{named} ..." if len(differing) > _MAX_NAMED_RANKS else named,
            )
        if rows.wanted != rows.is_on:
            logger.info("Toggling StragglerDetector State %s", _word(rows.wanted))


def report_lines(found: RankComparison, *, num_ranks: int) -> list[str]:
    """Return the lines for a log: one, and two more with ``num_ranks`` ranks at each end.

    Those two are left out where ``num_ranks`` is 1, or all.
    """
    fields = [time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(found.unix_time))]
    for label, metric in _PRINTED:
        unit = METRICS[metric]
        (smallest, of_smallest), (largest, of_largest) = found.extremes[metric]
        fields.append(f"Mn{label}/Rnk: {smallest:.2f}{unit}/{of_smallest}")
        fields.append(f"Mx{label}/Rnk: {largest:.2f}{unit}/{of_largest}")
    lines = [" | ".join(fields)]
    if 1 < num_ranks < found.world_size:
        lowest, highest = found.throughput_ends(num_ranks)
        lines.append(f"^^^^ Bottom {num_ranks} Ranks with lowest  Etpt(TF): {_listed(lowest)}")
        lines.append(f"^^^^ Top    {num_ranks} Ranks with highest Etpt(TF): {_listed(highest)}")
    return lines


def etpt_tf(total_flops: float, elapsed_ms: float, *, world: int, amp: float) -> float:
    """Return the estimated throughput of one rank in TFLOP/s; 0.0 where no range was timed.

    Its share of the job's operations over the time of its compute ranges, which are one ``amp``-th
    of the step: 3 where only the forward pass is timed.
    """
    return total_flops / (elapsed_ms * 1e9 * world * amp) if elapsed_ms > 0 else 0.0


def _listed(values: list[tuple[float, int]]) -> str:
    return " ".join(f"{value:.2f}/{rank}," for value, rank in values)


def _word(enabled: bool) -> str:
    return "ON" if enabled else "OFF"


class Pace:
    """Turns seconds into a number of steps between reports, on which all ranks agree.

    The first report comes after 16 steps; it shows how long a step takes.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._interval = _FIRST_STEPS
        self._began = time.monotonic()
        self.steps, self.flops = 0, 0.0

    def step(self, flops: float) -> bool:
        """Count a step and its operations; return whether a report is due."""
        self.steps += 1
        self.flops += flops
        return self.steps >= self._interval

    def wanted_interval(self) -> int:
        """Return how many steps this rank takes in the time between reports, by the last ones."""
        took_s = time.monotonic() - self._began
        return max(1, round(self.steps * self._every_s / took_s)) if took_s > 0 else _FIRST_STEPS

    def restart(self, interval: int) -> None:
        """Begin to count the agreed number of steps."""
        self._interval = max(1, interval)
        self._began = time.monotonic()
        self.steps, self.flops = 0, 0.0
