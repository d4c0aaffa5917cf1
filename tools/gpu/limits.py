"""A pytest plugin: a time limit for each test, and a journal of outcomes and reasons for skips."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from results.journal import append_line

JOURNAL, LIMIT = "GPU_JOURNAL", "GPU_TEST_LIMIT_S"
_GRACE_S = 20  # for a test that does not react to the signal, for example inside a kernel
_MISSING = re.compile(r"could not import '([\w.]+)'")
_SECOND_GPU = re.compile(r"fewer than two GPUs|needs two CUDA devices")


def is_accepted(reason: str) -> bool:
    """Return whether a skip is due to a library that is really missing, or to a second GPU."""
    if missing := _MISSING.search(reason):
        return importlib.util.find_spec(missing[1].partition(".")[0]) is None
    return _SECOND_GPU.search(reason) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that takes too long, and the process if that does not help."""
    limit_s = int(os.environ[LIMIT])

    def stop(*_: object) -> None:
        raise TimeoutError(f"the test took more than {limit_s} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test: of its call, or of a setup or teardown that did not pass."""
    if report.outcome != "passed" or getattr(report, "when", "") == "call":
        details, outcome = report.longrepr, str(report.outcome)
        reason = str(details[2] if isinstance(details, tuple) else details or "").strip()
        if outcome == "skipped" and not is_accepted(reason):
            outcome = "skipped without need"
        line = {"kind": "test", "name": report.nodeid, "outcome": outcome}
        append_line(Path(os.environ[JOURNAL]), {**line, "reason": reason[-1500:]})


pytest_collectreport = pytest_runtest_logreport  # of a file that fails or is skipped as a whole
