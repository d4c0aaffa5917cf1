"""The live table: with rich on a terminal, as plain text anywhere else."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from mcore.observe.sparkline import ASCII_BARS, BARS
from mcore.observe.straggler_command.client import Client
from mcore.observe.straggler_command.snapshot import View, look
from mcore.observe.straggler_command.table import columns, fitting, headline, lines, verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

_CLEAR = "\x1b[H\x1b[J"
_DRAW_EVERY_S = 0.5
_WIDTH_OF_PIPES = 120
_LINES_A_JOB = 4  # besides its ranks


class Watcher:
    """Asks every controller in a thread of its own, so that one that hangs delays no other."""

    def __init__(self, clients: Sequence[Client], metric: str, interval_s: float) -> None:
        self.views = [View(str(client.address), metric) for client in clients]
        self._clients = clients
        self._interval_s = interval_s
        self._has_ended = threading.Event()

    def look_once(self) -> None:
        """Ask all of them at the same time, and wait; a client's timeout bounds it."""
        threads = [
            threading.Thread(target=self._look, args=(at,), daemon=True)
            for at in range(len(self._clients))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def start(self) -> None:
        """Go on asking, in the background."""
        for at in range(len(self._clients)):
            threading.Thread(target=self._look_on, args=(at,), daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._has_ended.set()

    def _look(self, at: int) -> None:
        self.views[at] = look(self._clients[at], self.views[at])

    def _look_on(self, at: int) -> None:
        while not self._has_ended.wait(self._interval_s):
            self._look(at)


def watch(watcher: Watcher, most: int | None, out: TextIO) -> None:
    """Show the views until KeyboardInterrupt; a pipe gets those that changed, one below another."""
    watcher.look_once()
    watcher.start()
    try:
        if not is_terminal(out):
            _print_changes(watcher, most, out)
        elif has_rich():
            _show_with_rich(watcher, most, out)
        else:
            _redraw(watcher, most, out)
    finally:
        watcher.stop()


def text_of(views: Sequence[View], most: int | None, out: TextIO) -> str:
    """All views as text, as wide as the terminal, or as a wide one for a pipe."""
    size = shutil.get_terminal_size((_WIDTH_OF_PIPES, 24))
    width = max(1, size.columns - 1) if out.isatty() else _WIDTH_OF_PIPES
    rows = _rows_of_each(len(views), most, size.lines)
    blocks = (lines(view, rows, width, bars=_bars(out)) for view in views)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def is_terminal(out: TextIO) -> bool:
    """Return whether the output is a terminal that can be redrawn."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_rich() -> bool:
    """Return whether the extra ``watch`` is installed."""
    try:
        import rich.live  # noqa: F401
    except ImportError:
        return False
    return True


def _print_changes(watcher: Watcher, most: int | None, out: TextIO) -> None:
    seen: list[object] = []
    while True:
        now = [(view.report, view.error, view.status) for view in watcher.views]
        if now != seen:
            seen = [*now]
            out.write(f"{time.strftime('%H:%M:%S')}\n{text_of(watcher.views, most, out)}\n")
            out.flush()
        time.sleep(_DRAW_EVERY_S)


def _redraw(watcher: Watcher, most: int | None, out: TextIO) -> None:
    hint = 'for colours: pip install "mcore-observe[watch]"\n'
    while True:
        out.write(_CLEAR + text_of(watcher.views, most, out) + hint)
        out.flush()
        time.sleep(_DRAW_EVERY_S)


def _show_with_rich(watcher: Watcher, most: int | None, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out, highlight=False, markup=False, emoji=False)

    def drawn() -> RenderableType:
        return _renderable(watcher.views, most, console.width, console.height, _bars(out))

    with Live(drawn(), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_DRAW_EVERY_S)
            live.update(drawn(), refresh=True)


def _renderable(
    views: Sequence[View], most: int | None, width: int, height: int, bars: str
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = _rows_of_each(len(views), most, height)
    parts: list[RenderableType] = []
    for view in views:
        style = "bold red" if view.error is not None else "bold"
        parts.append(Text(headline(view), style, no_wrap=True, overflow="ellipsis"))
        if text := verdict(view):
            parts.append(Text(text, "red" if view.slow else "green", overflow="ellipsis"))
        by_title = fitting(columns(view, rows, bars=bars), width)
        if by_title:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for title in by_title:
                is_text = title in ("host", "slow in", "of late", "device")
                table.add_column(Text(title), justify="left" if is_text else "right", no_wrap=True)
            is_slow = [bool(row.slow_in) for row in view.rows(rows)]
            for slow, cells in zip(is_slow, zip(*by_title.values(), strict=True), strict=True):
                table.add_row(*map(Text, cells), style="red" if slow else "")
            parts.append(table)
        parts.append(Text())
    return Group(*parts)


def _rows_of_each(num_views: int, most: int | None, height: int) -> int:
    """The ranks shown of each job: as asked, else what fits."""
    if most is not None:
        return most
    return max(1, height // max(1, num_views) - _LINES_A_JOB)


def _bars(out: TextIO) -> str:
    try:
        BARS.encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_BARS
    return BARS
