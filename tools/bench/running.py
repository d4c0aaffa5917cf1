"""Finding the suites and running them. Errors are part of the result."""

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
from bench.measure import Row
from results.machine import describe_machine, load_average, timestamp

PEERS = ("megatron-core", "megatron-fsdp", "mlflow", "packaging")
_OURS = ("mcore", "bench")


@dataclass
class SuiteResult:
    """The results of one suite.

    Attributes:
        suite: Its name.
        when: The date and the time at which it began.
        seconds: Its duration.
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
    def is_complete(self) -> bool:
        """Whether it has all of its rows, and none disagrees."""
        return bool(self.rows) and not (self.failed or self.missing)


def suite_names(package: Any = bench.suites) -> list[str]:
    """The names of all modules in the folder, which are not imported.

    A dash in a suite's name is an underscore in the name of its module.
    """
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(package.__path__))


def run_suites(names: Sequence[str], package: Any = bench.suites) -> Iterator[SuiteResult]:
    """Run the suites one after the other. A failure does not stop the next suite."""
    for name in names:
        yield _run_suite(name, f"{package.__name__}.{name.replace('-', '_')}")


def facts() -> dict[str, str]:
    """The versions and settings that the figures of all suites depend on."""
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return {**describe_machine(*PEERS), "OMP_NUM_THREADS": threads}


def _run_suite(name: str, module: str) -> SuiteResult:
    result = SuiteResult(name, timestamp(), machine=facts(), load=[load_average()])
    started_s = time.monotonic()
    try:
        for row in importlib.import_module(module).run():
            result.rows.append(row)
    except ModuleNotFoundError as error:
        # A missing part of this repository is an error, a missing peer is not.
        if error.name is None or error.name.partition(".")[0] in _OURS:
            result.error = traceback.format_exc()
        else:
            result.missing = error.name
    except Exception:
        result.error = traceback.format_exc()
    result.seconds = round(time.monotonic() - started_s, 1)
    result.load.append(load_average())
    return result
