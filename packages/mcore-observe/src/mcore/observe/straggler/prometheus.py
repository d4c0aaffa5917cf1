"""Reports in the text format that Prometheus reads (version 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore.observe.straggler.controller_state import ControllerStatus
    from mcore.observe.straggler.report import StragglerReport

__all__ = ["prometheus_text", "report_text"]

_PREFIX = "mcore_straggler_"

# Metric of the report -> name, factor to the base unit, help.
_PER_RANK = {
    "elapsed_ms": ("iteration_seconds", 1e-3, "Time of the compute ranges per iteration."),
    "data_ms": ("data_seconds", 1e-3, "Longest data range of the last interval."),
    "temp_c": ("gpu_temperature_celsius", 1.0, "Temperature of the GPU."),
    "power_w": ("gpu_power_watts", 1.0, "Power that the GPU draws."),
    "util_pct": ("gpu_utilization_ratio", 1e-2, "Utilisation of the GPU from 0 to 1."),
    "clock_mhz": ("gpu_clock_hertz", 1e6, "Clock of the GPU."),
    "etpt_tf": ("estimated_tflops", 1.0, "Estimated throughput in TFLOP/s."),
}


def prometheus_text(status: ControllerStatus, report: StragglerReport | None) -> str:
    """Format the detector's state and its last report.

    Args:
        status: The state.
        report: The last report; None before the first.

    Returns:
        Text that ends with a newline.

    Example:
        >>> from mcore.observe.straggler.controller_state import ControllerState
        >>> state = ControllerState(rank=0, world_size=1, enabled=True)
        >>> print(prometheus_text(state.status(), None).splitlines()[2])
        mcore_straggler_enabled 1
    """
    lines = [
        *_head("enabled", "gauge", "Whether ranges are timed."),
        f"{_PREFIX}enabled {int(status.enabled)}",
        *_head("reports_total", "counter", "Reports since the start."),
        f"{_PREFIX}reports_total {status.reports}",
    ]
    return "\n".join(lines) + "\n" + (report_text(report) if report else "")


def report_text(report: StragglerReport) -> str:
    """Format the numbers of all ranks.

    Args:
        report: The report.

    Returns:
        Text that ends with a newline.
    """
    ranks = [
        f'rank="{rank}",host="{_escaped(host)}"'
        for rank, host in zip(report.ranks, report.hosts, strict=True)
    ]
    lines: list[str] = []
    for metric, (name, factor, text) in _PER_RANK.items():
        if metric in report.metrics:
            lines += _head(name, "gauge", text)
            lines += _samples(name, ranks, report.metrics[metric], factor)
    lines += _section_lines(report, ranks)
    lines += _head("outlier", "gauge", "1 for each rank and metric that stands out.")
    for outlier in report.outliers:
        labels = f'rank="{outlier.rank}",metric="{_escaped(outlier.metric)}"'
        lines.append(f"{_PREFIX}outlier{{{labels}}} 1")
    return "\n".join(lines) + "\n"


def _section_lines(report: StragglerReport, ranks: Sequence[str]) -> Iterator[str]:
    yield from _head("section_seconds", "gauge", "Time of the section per iteration.")
    per_iteration = 1e-3 / max(report.log_interval, 1)
    for section, stats in report.sections.items():
        sums = [each.sum_ms for each in stats]
        yield from _samples("section_seconds", _with_section(ranks, section), sums, per_iteration)
    for name, scores, text in (
        ("relative_score", report.relative_scores, "Median time of the fastest rank over own."),
        ("individual_score", report.individual_scores, "Own best median time over the current."),
    ):
        yield from _head(name, "gauge", text)
        for section, by_rank in scores.items():
            yield from _samples(name, _with_section(ranks, section), by_rank, 1.0)


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"


def _samples(
    name: str, labels: Iterable[str], values: Iterable[float], factor: float
) -> Iterator[str]:
    for of_rank, value in zip(labels, values, strict=True):
        yield f"{_PREFIX}{name}{{{of_rank}}} {_number(value * factor)}"


def _with_section(ranks: Iterable[str], section: str) -> Iterator[str]:
    label = f',section="{_escaped(section)}"'
    return (rank + label for rank in ranks)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.12g}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
