"""What each rank says in a report: one row of float64 of fixed length."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore.observe.straggler.section_stats import SectionStats

__all__ = [
    "ELAPSED",
    "ENABLED",
    "ETPT",
    "LOG_INTERVAL",
    "METRICS",
    "SCHEMA_VERSION",
    "SECTIONS_HASH",
    "SECTIONS_START",
    "STATS_PER_SECTION",
    "TOTAL_FLOPS",
    "WANTED",
    "RowHeader",
    "encode_row",
    "etpt_tf",
    "row_length",
]

SCHEMA_VERSION = 1

SCHEMA, SECTIONS_HASH, ENABLED, WANTED, IDLE, ELAPSED = range(6)
ETPT, LOG_INTERVAL, TOTAL_FLOPS, DROPPED, RESERVED = range(11, 16)
SECTIONS_START = 16
STATS_PER_SECTION = 4  # count, sum_ms, median_ms, max_ms

# The columns from ELAPSED to ETPT, with the unit that is printed.
METRICS = {
    "elapsed_ms": "ms",
    "data_ms": "ms",
    "temp_c": "C",
    "power_w": "W",
    "util_pct": "%",
    "clock_mhz": "MHz",
    "etpt_tf": "TF",
}

_NO_STATS = SectionStats(0, 0.0, math.nan, math.nan)


@dataclass(frozen=True)
class RowHeader:
    """What one rank says besides its sections.

    Attributes:
        sections_hash: See :func:`mcore.observe.straggler.sections.section_hash`.
        enabled: Whether this rank times ranges.
        wanted: The state that this rank wants after the report; that of rank 0 counts.
        idle: No compute range was timed.
        metrics: Seven numbers in the order of :data:`METRICS`; NaN where unknown.
        log_interval: Iterations since the last report.
        total_flops: Operations of the whole job in that time.
        dropped: Ranges timed by the host alone since ``configure``.
    """

    sections_hash: float
    enabled: bool
    wanted: bool
    idle: bool = True
    metrics: Sequence[float] = (math.nan,) * len(METRICS)
    log_interval: int = 0
    total_flops: float = 0.0
    dropped: int = 0


def row_length(num_sections: int) -> int:
    """Return the length of a row.

    Args:
        num_sections: The number of sections, with the two that are built in.

    Example:
        >>> row_length(2)
        24
    """
    return SECTIONS_START + STATS_PER_SECTION * num_sections


def encode_row(
    header: RowHeader, stats: Mapping[int, SectionStats], num_sections: int
) -> torch.Tensor:
    """Write one rank's part of a report.

    Args:
        header: What comes first.
        stats: Statistics by number of the section; sections without are written as no data, and
            numbers from ``num_sections`` on, which other ranks do not know, are left out.
        num_sections: The number of sections, with the two that are built in.

    Returns:
        float64, ``[row_length(num_sections)]``, on the CPU.

    Example:
        >>> encode_row(RowHeader(7.0, enabled=True, wanted=False), {}, 2)[:5].tolist()
        [1.0, 7.0, 1.0, 0.0, 1.0]
    """
    row: list[float] = [
        SCHEMA_VERSION,
        header.sections_hash,
        header.enabled,
        header.wanted,
        header.idle,
        *header.metrics,
        header.log_interval,
        header.total_flops,
        header.dropped,
        0.0,
    ]
    for section in range(num_sections):
        of_section = stats.get(section, _NO_STATS)
        row += (of_section.count, of_section.sum_ms, of_section.median_ms, of_section.max_ms)
    # A third of the time of torch.tensor, which looks at each number.
    return torch.frombuffer(array("d", row), dtype=torch.float64)


def etpt_tf(total_flops: float, elapsed_ms: float, *, world: int, amp: float) -> float:
    """Estimate the throughput of one rank.

    ``total_flops / (elapsed_ms * 1e9 * world * amp)``: operations of the rank's share, over the
    time of its compute ranges, where those are one ``amp``-th of the step.

    Args:
        total_flops: Operations of the whole job.
        elapsed_ms: Time of the rank's compute ranges, in ms.
        world: The number of ranks.
        amp: How many times longer a step takes than its timed part; 3 for the forward pass.

    Returns:
        TFLOP/s; 0.0 where no range was timed.

    Example:
        >>> round(etpt_tf(1e12, 10.0, world=1, amp=3.0), 2)
        33.33
    """
    return total_flops / (elapsed_ms * 1e9 * world * amp) if elapsed_ms > 0 else 0.0
