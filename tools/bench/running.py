"""Finding the suites and running them; what went wrong is part of the result."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import bench.suites
from bench.measure import Row

_OWN = ("mcore", "bench")


@dataclass
class SuiteResult:
    """The results of one suite.

    Attributes:
        suite: Its name.
        rows: The rows that it yielded, including those before an error.
        missing: The module that the suite needs and that is not installed, else empty.
        error: The traceback of anything else that it raised, else empty.
    """

    suite: str
    rows: list[Row] = field(default_factory=list)
    missing: str = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the suite raised or one of its rows disagrees."""
        return bool(self.error) or not all(row.agrees for row in self.rows)


def suite_names(package: Any = bench.suites) -> list[str]:
    """The names of all suites, found by walking the folder; imports none of them.

    A dash in a name is an underscore in that of its module.
    """
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(package.__path__))


def run_suites(names: Sequence[str], package: Any = bench.suites) -> Iterator[SuiteResult]:
    """Run the suites one after the other; one that fails doesn't stop the next."""
    for name in names:
        yield _run_suite(name, f"{package.__name__}.{name.replace('-', '_')}")


def _run_suite(name: str, module: str) -> SuiteResult:
    result = SuiteResult(name)
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
    return result
