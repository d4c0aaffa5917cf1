"""What a watcher knows of a job: its last report, who is slow, and the values of late."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from mcore.observe.straggler_command.client import AnswerError, Client, plain

NUM_KEPT = 32  # reports
SENSORS = {"temp_c": "C", "power_w": "W", "util_pct": "%", "clock_mhz": "MHz"}
_LOW_IS_BAD = ("etpt_tf", "util_pct", "clock_mhz")


@dataclass(frozen=True)
class Slow:
    """A rank that the report names, in what, and how its value compares with the others'."""

    rank: int
    host: str
    device: str  # empty where not known
    metric: str
    value: float
    times_median: float
    score: float

    @classmethod
    def read(cls, fields: dict[str, Any], report: dict[str, Any]) -> Slow:
        """Read one of a report's ``stragglers``."""
        host, device = plain(str(fields["host"])), plain(str(fields.get("device", "")))
        metric, value = str(fields["metric"]), _number(fields["value"])
        is_known = metric in report["metrics"] or metric in report["sections"]
        times = value / _median(_values_of(report, metric)) if is_known else math.nan
        score = _number(fields["score"])
        return cls(int(fields["rank"]), host, device, plain(metric), value, times, score)

    @property
    def who(self) -> str:
        """The rank and where it is."""
        return f"rank {self.rank} on {self.host}" + (f", {self.device}" if self.device else "")

    def __str__(self) -> str:
        times = self.times_median
        more = f" {times:.2f} x the median" if math.isfinite(times) else ""
        return f"{self.metric}{more}"


@dataclass(frozen=True)
class Report:
    """A report as far as a watcher shows it, by position; NaN for what is not known."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    values: tuple[float, ...]
    sensors: dict[str, tuple[float, ...]]  # those that some device has
    slow: tuple[Slow, ...]

    @classmethod
    def read(cls, report: dict[str, Any], metric: str) -> Report:
        """Read the JSON of a report; AnswerError where it is none, or has no such metric."""
        try:
            columns = {name: _numbers(report["metrics"].get(name, ())) for name in SENSORS}
            read = cls(
                ranks=tuple(map(int, report["ranks"])),
                hosts=tuple(plain(str(host)) for host in report["hosts"]),
                devices=tuple(plain(str(device)) for device in report["devices"]),
                values=_values_of(report, metric),
                sensors={k: v for k, v in columns.items() if any(map(math.isfinite, v))},
                slow=tuple(Slow.read(fields, report) for fields in report["stragglers"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"{type(error).__name__}: {plain(str(error))}"
            raise AnswerError(f"no report of a straggler controller ({what})") from error
        if (
            len(
                {
                    len(read.hosts),
                    len(read.devices),
                    len(read.ranks),
                    len(read.values),
                    *map(len, read.sensors.values()),
                }
            )
            != 1
        ):
            raise AnswerError("no report of a straggler controller (columns differ in length)")
        return read


@dataclass(frozen=True)
class Row:
    """A rank of the last report; NaN for what is not known. ``late`` ends with ``value``."""

    rank: int
    host: str
    device: str
    value: float
    times_median: float
    sensors: dict[str, float]
    slow_in: tuple[str, ...]
    late: tuple[float, ...]


@dataclass(frozen=True)
class View:
    """What one controller last said; ``error`` is None if it has just said it."""

    address: str
    metric: str
    status: dict[str, Any] = field(default_factory=dict)
    report: Report | None = None
    error: str | None = "not asked yet"
    clock_ahead_s: float = 0.0
    late: tuple[tuple[float, ...], ...] = ()  # the values of the last reports

    @property
    def slow(self) -> tuple[Slow, ...]:
        """Who the last report names; nobody where the controller does not answer."""
        return () if self.report is None or self.error is not None else self.report.slow

    @property
    def report_age_s(self) -> float | None:
        """Seconds since the last report, by the clock of the controller's machine."""
        made = self.status.get("last_report_unix")
        if not isinstance(made, (int, float)):
            return None
        return max(0.0, time.time() + self.clock_ahead_s - made)

    def rows(self, most: int) -> list[Row]:
        """The ranks of the last report: those that are slow, then the others, the worst first."""
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
        middle = _median(report.values)
        return [
            Row(
                rank=report.ranks[at],
                host=report.hosts[at],
                device=report.devices[at],
                value=report.values[at],
                times_median=report.values[at] / middle,
                sensors={name: values[at] for name, values in report.sensors.items()},
                slow_in=tuple(slow_in.get(report.ranks[at], ())),
                late=tuple(values[at] for values in self.late),
            )
            for at in order[:most]
        ]


def look(client: Client, before: View) -> View:
    """Ask a controller, and for its report where there is a new one; errors are in the view."""
    try:
        answer = client.ask("GET", "/status").checked()
        status = answer.json()
        if not isinstance(status.get("reports"), int) or "world_size" not in status:
            raise AnswerError(f"no straggler controller: it answers {plain(answer.text)!r}")
        after = replace(
            before, status=status, error=None, clock_ahead_s=answer.unix_time - time.time()
        )
        if not status["reports"]:
            return replace(after, report=None, late=())
        if before.report is not None and _made(status) == _made(before.status):
            return after
        report = Report.read(client.ask("GET", "/report").checked().json(), before.metric)
    except AnswerError as error:
        return replace(before, error=str(error))
    was_restarted = status["reports"] < before.status.get("reports", 0)
    is_another = before.report is None or report.ranks != before.report.ranks
    late = () if was_restarted or is_another else before.late
    return replace(after, report=report, late=(*late[1 - NUM_KEPT :], report.values))


def _made(status: dict[str, Any]) -> tuple[Any, Any]:
    return status.get("reports"), status.get("last_report_unix")


def _values_of(report: dict[str, Any], metric: str) -> tuple[float, ...]:
    metrics, sections = report["metrics"], report["sections"]
    if metric in metrics:
        return _numbers(metrics[metric])
    if metric not in sections:
        names = plain(", ".join([*metrics, *sections]), 400)
        raise AnswerError(f"the report has no metric {metric!r}; it has {names}")
    steps = max(1, int(report["log_interval"]))
    return tuple(_number(one["sum_ms"]) / steps for one in sections[metric])


def _median(values: Iterable[float]) -> float:
    """The median, of two in the middle the lower one: of two ranks the faster; NaN for zero."""
    return median_low([v for v in values if math.isfinite(v)] or [math.nan]) or math.nan


def _numbers(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
