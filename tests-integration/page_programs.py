"""Programs of pages that show slow ranks, by a clock that a busy machine cannot move."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

from mcore.observe.straggler.ranges import HostRanges


def run_by_sleeps(code: str, name: str) -> None:
    """Run a program. Its sleeps end at once, and only they move the clock of its detector."""
    now_ns = 0

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    names = {"__name__": "__main__", "time": SimpleNamespace(sleep=sleep)}
    with mock.patch.dict(HostRanges.__init__.__kwdefaults__, now_ns=lambda: now_ns):
        exec(compile(code.replace("import time\n", ""), name, "exec"), names)
