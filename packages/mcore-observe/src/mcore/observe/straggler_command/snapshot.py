"""A snapshot of a job: its last report, its slow ranks, and the values of its recent reports."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from mcore.observe.straggler_command.client import MOST_TEXT, AnswerError, Client
from mcore.observe.terminal import plain

NUM_KEPT = 32  # reports
SENSORS = {"temp_c": "C", "power_w": "W", "util_pct": "%", "clock_mhz": "MHz"}
_LOW_IS_BAD = ("etpt_tf", "util_pct", "clock_mhz")


@dataclass(frozen=True)
class SlowRank:
    """A slow rank of the report, the metric in which it is slow, and its value over the median."""

    rank: int
    host: str
    device: str  # empty if unknown
    metric: str
    value: float
    times_median: float
    score: float

    @classmethod
    def read(cls, fields: dict[str, Any], report: dict[str, Any]) -> SlowRank:
        """Read an element of a report's ``stragglers``."""
        host, device = (
            plain(str(fields["host"]), MOST_TEXT),
            plain(str(fields.get("device", "")), MOST_TEXT),
        )
        metric, value = str(fields["metric"]), _read_number(fields["value"])
        times = value / _compute_median(_read_values(report, metric))
        score = _read_number(fields["score"])
        return cls(int(fields["rank"]), host, device, plain(metric, MOST_TEXT), value, times, score)

    @property
    def place(self) -> str:
        """The rank with its host and device."""
        return f"rank {self.rank} on {self.host}" + (f", {self.device}" if self.device else "")

    def __str__(self) -> str:
        times = self.times_median
        more = f" {times:.2f} x the median" if math.isfinite(times) else ""
        return f"{self.metric}{more}"


@dataclass(frozen=True)
class ReportColumns:
    """The columns of a report that are shown, by position in the group. NaN if unknown."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    values: tuple[float, ...]  # NaN if the report lacks the metric
    names: tuple[str, ...]  # of its metrics and sections
    sensors: dict[str, tuple[float, ...]]  # that at least one device has
    slow: tuple[SlowRank, ...]
    is_measuring: bool  # too few reports for a slow rank

    @classmethod
    def read(cls, report: dict[str, Any], metric: str) -> ReportColumns:
        """Read the JSON of a report. AnswerError if it is not a report."""
        try:
            sensors = {
                name: tuple(map(_read_number, report["metrics"].get(name, ()))) for name in SENSORS
            }
            columns = cls(
                ranks=tuple(map(int, report["ranks"])),
                hosts=tuple(plain(str(host), MOST_TEXT) for host in report["hosts"]),
                devices=tuple(plain(str(device), MOST_TEXT) for device in report["devices"]),
                values=_read_values(report, metric) or (math.nan,) * len(report["ranks"]),
                names=tuple(
                    plain(name, MOST_TEXT) for name in (*report["metrics"], *report["sections"])
                ),
                sensors={k: v for k, v in sensors.items() if any(map(math.isfinite, v))},
                slow=tuple(SlowRank.read(fields, report) for fields in report["stragglers"]),
                is_measuring=report.get("measuring") is True,
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {plain(str(error), MOST_TEXT)}"
            raise AnswerError(f"not a report of a straggler controller ({reason})") from error
        by_rank = (columns.hosts, columns.devices, columns.values, *columns.sensors.values())
        if any(len(column) != len(columns.ranks) for column in by_rank):
            raise AnswerError("not a report of a straggler controller (columns differ in length)")
        return columns


@dataclass(frozen=True)
class JobSnapshot:
    """The last answers of a controller. ``error`` is None if the last request was answered."""

    address: str
    metric: str
    status: dict[str, Any] = field(default_factory=dict)
    report: ReportColumns | None = None
    error: str | None = "no request yet"
    clock_ahead_s: float = 0.0
    recent: tuple[tuple[float, ...], ...] = ()  # the values of the last reports

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The slow ranks of the last report. Empty if the controller does not answer."""
        return () if self.report is None or self.error is not None else self.report.slow

    @property
    def report_age_s(self) -> float | None:
        """Seconds since the last report, by the clock of the controller's machine."""
        made = self.status.get("last_report_unix")
        if not isinstance(made, (int, float)):
            return None
        return max(0.0, time.time() + self.clock_ahead_s - made)

    def rows(self, most: int) -> list[dict[str, Any]]:
        """The ranks of the last report: slow ranks, then the others, the worst first.

        Numbers are NaN if unknown. ``recent`` ends with ``value``.
        """
        report = self.report
        if report is None:
            return []
        slow_in: dict[int, list[str]] = {}
        for one in report.slow:
            slow_in.setdefault(one.rank, []).append(one.metric)
        sign = 1.0 if self.metric in _LOW_IS_BAD else -1.0
        badness = [sign * v if math.isfinite(v) else math.inf for v in report.values]
        order = sorted(
            range(len(badness)), key=lambda at: (report.ranks[at] not in slow_in, badness[at])
        )
        median = _compute_median(report.values)
        return [
            {
                "rank": report.ranks[at],
                "host": report.hosts[at],
                "device": report.devices[at],
                "value": report.values[at],
                "times_median": report.values[at] / median,
                "slow_in": slow_in.get(report.ranks[at], []),
                **{name: values[at] for name, values in report.sensors.items()},
                "recent": tuple(values[at] for values in self.recent),
            }
            for at in order[:most]
        ]


def refresh(client: Client, before: JobSnapshot) -> JobSnapshot:
    """Request the status, and the report if it is new. Errors are kept in the snapshot."""
    try:
        response = client.request("GET", "/status").check()
        status = response.json()
        if not isinstance(status.get("reports"), int) or "world_size" not in status:
            raise AnswerError(
                f"not a straggler controller: it answers {plain(response.text, MOST_TEXT)!r}"
            )
        after = replace(
            before, status=status, error=None, clock_ahead_s=response.unix_time - time.time()
        )
        if not status["reports"]:
            return replace(after, report=None, recent=())
        # A restarted job may have the same number of reports, but not the same time.
        keys = ("reports", "last_report_unix")
        if before.report is not None and all(
            status.get(key) == before.status.get(key) for key in keys
        ):
            return after
        answer = client.request("GET", "/report").check().json()
        report = ReportColumns.read(answer, before.metric)
    except AnswerError as error:
        return replace(before, error=str(error))
    was_restarted = status["reports"] < before.status.get("reports", 0)
    is_another_job = before.report is None or report.ranks != before.report.ranks
    recent = () if was_restarted or is_another_job else before.recent
    return replace(after, report=report, recent=(*recent[1 - NUM_KEPT :], report.values))


def _read_values(report: dict[str, Any], metric: str) -> tuple[float, ...]:
    """Return the values of a metric or section by rank, none if the report lacks it."""
    metrics, sections = report["metrics"], report["sections"]
    if metric in metrics:
        return tuple(map(_read_number, metrics[metric]))
    steps = max(1, int(report["log_interval"]))
    return tuple(_read_number(one["sum_ms"]) / steps for one in sections.get(metric, ()))


def _compute_median(values: Iterable[float]) -> float:
    """Return the lower median: of two ranks the faster. NaN for zero, which cannot divide."""
    return median_low([v for v in values if math.isfinite(v)] or [math.nan]) or math.nan


def _read_number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
