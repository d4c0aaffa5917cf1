"""The pytest plugin of ``hatch run test``: a worker per core, unless a file or test is named.

A failed test is named immediately, and listed at the end. If a worker dies, the run ends.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Until the tests start: few of the many objects that imports make are garbage.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Request workers before pytest-xdist reads its options."""
    if _wants_workers(config):
        config.option.numprocesses = "auto"
        if config.option.dist == "no":
            config.option.dist = "loadgroup"
        # With groups, pytest-xdist 3.8 waits forever after it has replaced a worker.
        config.option.maxworkerrestart = config.option.maxworkerrestart or "0"
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name failed tests in the process that prints, which gets the reports of all workers."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and terminal.verbosity < 1 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(terminal))


@dataclasses.dataclass(eq=False)
class _Failures:
    terminal: pytest.TerminalReporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a test that has failed."""
        if report.failed:
            self.terminal.write(f"\nFAILED {report.nodeid}\n", flush=True, red=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Inform a worker about groups, which its copy of the command line does not name."""
    node.workerinput["keeps_groups"] = node.config.option.dist == "loadgroup"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests of a group, and tests that share a fixture of their file, on one worker.

    Slow tests come first, so no worker is left alone with one at the end.
    """
    if not getattr(config, "workerinput", {}).get("keeps_groups"):
        return
    config.option.loadgroup = True
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collections, which many tests trigger."""
    gc.freeze()
    gc.enable()


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a fixture of the test has the scope of its file."""
    found = getattr(item, "_fixtureinfo", None)
    if found is None:  # no test function, so without fixtures
        return False
    return any(made[-1].scope == "module" for made in found.name2fixturedefs.values() if made)


def _wants_workers(config: pytest.Config) -> bool:
    """Whether pytest-xdist is installed, no option decides, and more than a file is to run."""
    options = config.option
    if hasattr(config, "workerinput") or getattr(options, "numprocesses", 0) is not None:
        return False
    if options.usepdb or options.trace or options.collectonly or options.capture == "no":
        return False
    return all(Path(config.invocation_params.dir, path).is_dir() for path in config.args)
