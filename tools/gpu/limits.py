"""A pytest plugin: a time limit for each test, and a journal of outcomes and reasons for skips."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from results.journal import append_line

JOURNAL, LIMIT = "GPU_JOURNAL", "GPU_TEST_LIMIT_S"
_MISSING = re.compile(r"could not import '([\w.]+)'")
_SECOND_GPU = re.compile(r"fewer than two GPUs|needs two CUDA devices")

if importlib.util.find_spec("hypothesis") is None:  # files with tests for a GPU import it
    skip = pytest.mark.skip(reason="could not import 'hypothesis'")
    stub = MagicMock(given=lambda *_, **__: skip, settings=lambda *_, **__: skip)
    stub.__spec__ = importlib.util.spec_from_loader("hypothesis", None)  # torch looks for it
    sys.modules |= {"hypothesis": stub, "hypothesis.strategies": stub}


def is_accepted(reason: str) -> bool:
    """Return whether a skip is due to a library that is really missing, or to a second GPU."""
    if missing := _MISSING.search(reason):
        spec = importlib.util.find_spec(missing[1].partition(".")[0])
        return spec is None or spec.loader is None  # of the stub above
    return _SECOND_GPU.search(reason) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that takes too long. The limit of the phase ends one inside a kernel."""
    limit_s = int(os.environ[LIMIT])

    def stop(*_: object) -> None:
        raise TimeoutError(f"the test took more than {limit_s} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        return (yield)
    finally:
        signal.alarm(0)


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
