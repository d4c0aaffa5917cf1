"""The live table on a terminal, and as text anywhere else."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from mcore.observe.straggler_command.client import Client
from mcore.observe.straggler_command.snapshot import JobSnapshot, refresh
from mcore.observe.straggler_command.table import build_table, format_text
from mcore.observe.terminal import ASCII_BARS, BARS

if TYPE_CHECKING:
    from rich.console import RenderableType

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
