"""The live table: with rich on a terminal, as plain text anywhere else."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from mcore.observe.straggler_command.client import Client
from mcore.observe.straggler_command.snapshot import JobSnapshot, refresh
from mcore.observe.straggler_command.table import (
    LEFT_ALIGNED,
    columns,
    fitting,
    headline,
    lines,
    verdict,
)
from mcore.observe.terminal import ASCII_BARS, BARS

if TYPE_CHECKING:
    from rich.console import RenderableType

_CLEAR = "\x1b[H\x1b[J"
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
        threads = [
            threading.Thread(target=self._refresh, args=(at,), daemon=True)
            for at in range(len(self._clients))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def start(self) -> None:
        """Continue to poll in the background."""
        for at in range(len(self._clients)):
            threading.Thread(target=self._keep_refreshing, args=(at,), daemon=True).start()

    def stop(self) -> None:
        """Stop polling."""
        self._has_ended.set()

    def _refresh(self, at: int) -> None:
        self.jobs[at] = refresh(self._clients[at], self.jobs[at])

    def _keep_refreshing(self, at: int) -> None:
        while not self._has_ended.wait(self._interval_s):
            self._refresh(at)


def show_live(poller: Poller, most: int | None, out: TextIO) -> None:
    """Show the jobs until KeyboardInterrupt. A pipe gets all jobs after each change."""
    poller.poll_once()
    poller.start()
    try:
        if not is_terminal(out):
            _print_changes(poller, most, out)
        elif has_rich():
            _show_with_rich(poller, most, out)
        else:
            _redraw_text(poller, most, out)
    finally:
        poller.stop()


def text_of(jobs: Sequence[JobSnapshot], most: int | None, out: TextIO) -> str:
    """Return all jobs as text, as wide as the terminal, or 120 columns for a pipe."""
    size = shutil.get_terminal_size((_WIDTH_OF_PIPES, 24))
    width = max(1, size.columns - 1) if out.isatty() else _WIDTH_OF_PIPES
    rows = _count_rows(len(jobs), most, size.lines)
    blocks = (lines(job, rows, width, bars=_choose_bars(out)) for job in jobs)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def is_terminal(out: TextIO) -> bool:
    """Return whether the output is a terminal that can be cleared."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_rich() -> bool:
    """Return whether the extra ``watch`` is installed."""
    try:
        import rich.live  # noqa: F401
    except ImportError:
        return False
    return True


def _print_changes(poller: Poller, most: int | None, out: TextIO) -> None:
    seen: list[object] = []
    while True:
        now = [(job.report, job.error, job.status) for job in poller.jobs]
        if now != seen:
            seen = [*now]
            out.write(f"{time.strftime('%H:%M:%S')}\n{text_of(poller.jobs, most, out)}\n")
            out.flush()
        time.sleep(_DRAW_EVERY_S)


def _redraw_text(poller: Poller, most: int | None, out: TextIO) -> None:
    hint = 'for colours: pip install "mcore-observe[watch]"\n'
    while True:
        out.write(_CLEAR + text_of(poller.jobs, most, out) + hint)
        out.flush()
        time.sleep(_DRAW_EVERY_S)


def _show_with_rich(poller: Poller, most: int | None, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out, highlight=False, markup=False, emoji=False)

    def draw() -> RenderableType:
        return _build_renderable(
            poller.jobs, most, console.width, console.height, _choose_bars(out)
        )

    with Live(draw(), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_DRAW_EVERY_S)
            live.update(draw(), refresh=True)


def _build_renderable(
    jobs: Sequence[JobSnapshot], most: int | None, width: int, height: int, bars: str
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = _count_rows(len(jobs), most, height)
    parts: list[RenderableType] = []
    for job in jobs:
        style = "bold red" if job.error is not None else "bold"
        parts.append(Text(headline(job), style, no_wrap=True, overflow="ellipsis"))
        if text := verdict(job):
            parts.append(Text(text, "red" if job.slow else "green", overflow="ellipsis"))
        by_title = fitting(columns(job, rows, bars=bars), width)
        if by_title:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for title in by_title:
                is_text = title in LEFT_ALIGNED
                table.add_column(Text(title), justify="left" if is_text else "right", no_wrap=True)
            is_slow = [bool(row.slow_in) for row in job.rows(rows)]
            for slow, cells in zip(is_slow, zip(*by_title.values(), strict=True), strict=True):
                table.add_row(*map(Text, cells), style="red" if slow else "")
            parts.append(table)
        parts.append(Text())
    return Group(*parts)


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
