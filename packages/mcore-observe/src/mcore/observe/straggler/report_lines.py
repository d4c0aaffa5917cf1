"""The lines that rank 0 logs for a report; their form is fixed, since other tools read them."""

from __future__ import annotations

import time

from mcore.observe.straggler.report import StragglerReport
from mcore.observe.straggler.rows import METRICS

__all__ = ["report_lines"]

# What is printed, in this order: label and metric.
_PRINTED = (
    ("Rtt", "elapsed_ms"),
    ("Pwr", "power_w"),
    ("Tmp", "temp_c"),
    ("Utl", "util_pct"),
    ("Clk", "clock_mhz"),
    ("DRtt", "data_ms"),
    ("Etpt", "etpt_tf"),
)
_LINE = " | ".join(
    [
        "%s",
        *(
            f"M{end}{label}/Rnk: %.2f{METRICS[metric].replace('%', '%%')}/%d"
            for label, metric in _PRINTED
            for end in ("n", "x")
        ),
    ]
)


def report_lines(report: StragglerReport, *, num_ranks: int) -> list[str]:
    """Format a report.

    Args:
        report: The report.
        num_ranks: How many ranks with the lowest and the highest throughput to list, in two more
            lines; none where that is 1, or all.

    Returns:
        One line or three.

    Example:
        >>> report = StragglerReport(
        ...     unix_time=0.0, world_size=1, log_interval=10, total_flops=1e12, hosts=("a",),
        ...     metrics=dict.fromkeys(
        ...         ("elapsed_ms", "data_ms", "temp_c", "power_w", "util_pct", "clock_mhz",
        ...          "etpt_tf"), (20.0,)),
        ...     sections={}, relative_scores={}, individual_scores={}, outliers=())
        >>> report_lines(report, num_ranks=1)[0].split(" | ")[1:3]
        ['MnRtt/Rnk: 20.00ms/0', 'MxRtt/Rnk: 20.00ms/0']
    """
    local = time.localtime(report.unix_time)
    fields: list[str | float] = [time.strftime("[%Y-%m-%d %H:%M:%S]", local)]
    for _, metric in _PRINTED:
        smallest, largest = report._extremes(metric)
        fields += (*smallest, *largest)
    lines = [_LINE % tuple(fields)]
    if 1 < num_ranks < report.world_size:
        lowest, highest = report.throughput_ends(num_ranks)
        lines.append(f"^^^^ Bottom {num_ranks} Ranks with lowest  Etpt(TF): {_listed(lowest)}")
        lines.append(f"^^^^ Top    {num_ranks} Ranks with highest Etpt(TF): {_listed(highest)}")
    return lines


def _listed(values: list[tuple[float, int]]) -> str:
    return " ".join(f"{value:.2f}/{rank}," for value, rank in values)
