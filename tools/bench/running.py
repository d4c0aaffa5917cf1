"""Finding the suites and running them; what went wrong is part of the result."""

from __future__ import annotations

import importlib
import os
import pkgutil
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import bench.suites
from bench.machine import load_average, machine, now
from bench.measure import Row

PEERS = ("megatron-core", "megatron-fsdp", "mlflow", "packaging")
_OWN = ("mcore", "bench")


@dataclass
class SuiteResult:
    """The results of one suite.

    Attributes:
        suite: Its name.
        when: The date and the time at which it began.
        seconds: How long it took.
        load: The load average before and after it.
        machine: The processor and the versions.
        rows: The rows that it yielded, including those before an error.
        missing: The module that the suite needs and that is not installed, else empty.
        error: The traceback of anything else that it raised, else empty.
    """

    suite: str
    when: str = ""
    seconds: float = 0.0
    load: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    missing: str = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the suite raised or one of its rows disagrees."""
        return bool(self.error) or not all(row.agrees for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """Whether it has all of its rows, and none disagrees."""
        return bool(self.rows) and not (self.failed or self.missing)


def suite_names(package: Any = bench.suites) -> list[str]:
    """The names of all suites, found by walking the folder; imports none of them.

    A dash in a name is an underscore in that of its module.
    """
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(package.__path__))


def run_suites(names: Sequence[str], package: Any = bench.suites) -> Iterator[SuiteResult]:
    """Run the suites one after the other; one that fails doesn't stop the next."""
    for name in names:
        yield _run_suite(name, f"{package.__name__}.{name.replace('-', '_')}")


def facts() -> dict[str, str]:
    """What the figures of all suites depend on."""
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return {**machine(*PEERS), "OMP_NUM_THREADS": threads}


def _run_suite(name: str, module: str) -> SuiteResult:
    result = SuiteResult(name, now(), machine=facts(), load=[load_average()])
    started_s = time.monotonic()
    try:
        for row in importlib.import_module(module).run():
            result.rows.append(row)
    except ModuleNotFoundError as error:
        top_level = (error.name or "").partition(".")[0]
        if error.name is None or top_level in _OWN:
            result.error = traceback.format_exc()
        else:
            result.missing = error.name
    except Exception:
        result.error = traceback.format_exc()
    result.seconds = round(time.monotonic() - started_s, 1)
    result.load.append(load_average())
    return result
