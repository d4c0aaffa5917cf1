"""Snapshots of jobs as a table, live on a terminal or as text, and as a JSON object."""

from __future__ import annotations

import io
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from mcore.observe.straggler_command.client import Client
from mcore.observe.straggler_command.snapshot import SENSORS, JobSnapshot, refresh
from mcore.observe.terminal import ASCII_BARS, BARS, sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType


_UNITS = {"data_ms": "ms", "etpt_tf": "TFLOP/s", **SENSORS}
_SPARK = 16
_MOST_NAMED = 3
_MOST_CHARACTERS = 24  # of a host or a list of sections
_LEFT_ALIGNED = ("host", "slow in", "recent", "device")


def headline(job: JobSnapshot) -> str:
    """Return the state of a job in a line: on or off, ranks, reports and the last one's age."""
    if job.error is not None:
        return f"{job.address}  NO ANSWER: {job.error}"
    age, pending = job.report_age_s, job.status.get("pending")
    switch = "on" if job.status.get("enabled") else "off"
    if pending is not None:
        switch += f" ({'on' if pending else 'off'} after a report)"
    parts = [
        job.address,
        switch,
        f"{job.status['world_size']} ranks",
        "no report yet"
        if age is None
        else f"report {job.status['reports']}, {_format_age(age)} ago",
    ]
    return "  ".join(parts)


def verdict(job: JobSnapshot) -> str:
    """Return the slow ranks in a line. Empty if there is no report."""
    if job.report is None or job.error is not None:
        return ""
    if not job.slow:
        is_early = job.report.is_measuring
        return "measuring: too few reports for a verdict" if is_early else "no rank is slow"
    signs: dict[str, list[str]] = {}
    for one in job.slow:
        signs.setdefault(one.place, []).append(str(one))
    named = [f"{place} ({', '.join(of_place)})" for place, of_place in signs.items()]
    more = len(named) - _MOST_NAMED
    return "SLOW: " + ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def columns(job: JobSnapshot, most: int, *, bars: str = BARS) -> dict[str, list[str]]:
    """Return the slowest ranks by column. None if the controller does not answer."""
    rows = [] if job.error is not None else job.rows(most)
    recent = [value for row in rows for value in row["recent"] if math.isfinite(value)]
    ends = (min(recent, default=0.0), max(recent, default=0.0))
    by_title = {
        "rank": [str(row["rank"]) for row in rows],
        "host": [_clip(row["host"]) for row in rows],
        value_title(job): [_format_number(row["value"]) for row in rows],
        "x median": [_format_number(row["times_median"], ".2f") for row in rows],
        "device": [_describe_device(row) for row in rows],
        "slow in": [_clip(", ".join(row["slow_in"])) for row in rows],
        "recent": [
            sparkline(row["recent"][-_SPARK:], _SPARK, ends=ends, bars=bars) for row in rows
        ],
    }
    return {title: cells for title, cells in by_title.items() if any(cells)}


def value_title(job: JobSnapshot) -> str:
    """Return the title of the column of values: the metric with its unit."""
    unit = _UNITS.get(job.metric, "ms")
    return "step ms" if job.metric == "elapsed_ms" else f"{job.metric.partition('_')[0]} {unit}"


def build_table(jobs: Sequence[JobSnapshot], most: int, bars: str) -> RenderableType:
    """Return all jobs for a terminal, each with its ``most`` slowest ranks."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for job in jobs:
        style = "bold red" if job.error is not None else "bold"
        parts.append(Text(headline(job), style, no_wrap=True, overflow="crop"))
        if text := verdict(job):
            style = "red" if job.slow else "green"
            parts.append(Text(text, style, no_wrap=True, overflow="crop"))
        by_title = columns(job, most, bars=bars)
        if by_title:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for title in by_title:
                justify: Any = "left" if title in _LEFT_ALIGNED else "right"
                # The numbers stay whole while there is room for them.
                low = 6 if title in ("rank", "x median", value_title(job)) else None
                heading = Text(title, overflow="crop")
                table.add_column(
                    heading, justify=justify, no_wrap=True, overflow="crop", min_width=low
                )
            is_slow = [bool(row["slow_in"]) for row in job.rows(most)]
            for slow, cells in zip(is_slow, zip(*by_title.values(), strict=True), strict=True):
                table.add_row(*map(Text, cells), style="red" if slow else "")
            parts.append(table)
            if job.report is not None and (hidden := len(job.report.ranks) - most) > 0:
                parts.append(Text(f"({hidden} more ranks)", no_wrap=True, overflow="crop"))
        parts.append(Text())
    return Group(*parts)


def format_text(jobs: Sequence[JobSnapshot], most: int, width: int, bars: str = BARS) -> str:
    """Return all jobs as text of a width, without colours."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(build_table(jobs, most, bars))
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()) + "\n"


def as_json(jobs: Sequence[JobSnapshot], most: int) -> dict[str, Any]:
    """Return the object of ``watch --once --json``: whether a rank is slow, and each controller."""
    keys = ("enabled", "pending", "world_size", "reports", "last_report_unix")
    controllers = []
    for job in jobs:
        described: dict[str, Any] = {"address": job.address, "error": job.error}
        if job.error is None:
            described |= {key: job.status.get(key) for key in keys}
            described |= {"report_age_s": job.report_age_s, "metric": job.metric}
            described["slow"] = [_replace_nan(vars(one)) for one in job.slow]
            described["slowest"] = [
                _replace_nan({key: value for key, value in row.items() if key != "recent"})
                for row in job.rows(most)
            ]
        controllers.append(described)
    return {
        "slow": any(job.slow for job in jobs),
        "unreachable": sum(job.error is not None for job in jobs),
        "controllers": controllers,
    }


def _replace_nan(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def _describe_device(row: Mapping[str, Any]) -> str:
    """Return the name of a rank's device with its sensors."""
    readings = (
        f"{row[name]:.0f}{unit}"
        for name, unit in SENSORS.items()
        if math.isfinite(row.get(name, math.nan))
    )
    return " ".join((_clip(row["device"]), *readings)).strip()


def _format_age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _format_number(value: float, form: str = ".4g") -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _clip(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 2]}.."


_DRAW_EVERY_S = 0.5
_WIDTH_OF_PIPES = 120
_LINES_PER_JOB = 4  # without its ranks


class Poller:
    """Polls each controller in a separate thread, so none that hangs delays the others."""

    def __init__(self, clients: Sequence[Client], metric: str, interval_s: float) -> None:
        self.jobs = [JobSnapshot(str(client.address), metric) for client in clients]
        self._clients = clients
        self._interval_s = interval_s
        self._has_ended = threading.Event()

    def poll_once(self) -> None:
        """Poll all controllers at the same time, and wait up to the timeout of the clients."""
        for thread in self.start(is_repeated=False):
            thread.join()

    def start(self, *, is_repeated: bool = True) -> list[threading.Thread]:
        """Poll in the background, until :meth:`stop`."""
        threads = [
            threading.Thread(target=self._refresh, args=(at, is_repeated), daemon=True)
            for at in range(len(self._clients))
        ]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        """Stop polling."""
        self._has_ended.set()

    def _refresh(self, at: int, is_repeated: bool = False) -> None:
        while not (is_repeated and self._has_ended.wait(self._interval_s)):
            self.jobs[at] = refresh(self._clients[at], self.jobs[at])
            if not is_repeated:
                return


def show_live(poller: Poller, most: int | None, out: TextIO) -> None:
    """Show the polled jobs until KeyboardInterrupt. A pipe gets all jobs after each change."""
    poller.start()
    try:
        # A dumb terminal cannot be cleared.
        if out.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            _redraw(poller, most, out)
        else:
            _print_changes(poller, most, out)
    finally:
        poller.stop()


def text_of(jobs: Sequence[JobSnapshot], most: int | None, out: TextIO) -> str:
    """Return all jobs as text, as wide as the terminal, or 120 columns for a pipe."""
    size = shutil.get_terminal_size((_WIDTH_OF_PIPES, 24))
    width = max(1, size.columns - 1) if out.isatty() else _WIDTH_OF_PIPES
    return format_text(jobs, _count_rows(len(jobs), most, size.lines), width, _choose_bars(out))


def _print_changes(poller: Poller, most: int | None, out: TextIO) -> None:
    seen: list[object] = []
    while True:
        now = [(job.report, job.error, job.status) for job in poller.jobs]
        if now != seen:
            seen = [*now]
            out.write(f"{time.strftime('%H:%M:%S')}\n{text_of(poller.jobs, most, out)}\n")
            out.flush()
        time.sleep(_DRAW_EVERY_S)


def _redraw(poller: Poller, most: int | None, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out, highlight=False, markup=False, emoji=False)

    def draw() -> RenderableType:
        rows = _count_rows(len(poller.jobs), most, console.height)
        return build_table(poller.jobs, rows, _choose_bars(out))

    with Live(draw(), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_DRAW_EVERY_S)
            live.update(draw(), refresh=True)


def _count_rows(num_jobs: int, most: int | None, height: int) -> int:
    """Return the number of ranks per job: as given, else as many as fit."""
    if most is not None:
        return most
    return max(1, height // max(1, num_jobs) - _LINES_PER_JOB)


def _choose_bars(out: TextIO) -> str:
    try:
        BARS.encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_BARS
    return BARS
