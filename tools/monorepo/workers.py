"""The pytest plugin of ``hatch run test``: a worker per core, unless a file or test is named."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Ask for workers before pytest-xdist reads its options."""
    if _are_wanted(config):
        config.option.numprocesses = "auto"
        if config.option.dist == "no":
            config.option.dist = "loadgroup"
    return (yield)


def pytest_collection_finish() -> None:
    """Take what is imported by now out of garbage collections, of which tests ask for many."""
    gc.collect()
    gc.freeze()


def _are_wanted(config: pytest.Config) -> bool:
    """Return whether pytest-xdist is installed, nobody chose, and more than a file is to be run."""
    options = config.option
    if hasattr(config, "workerinput") or getattr(options, "numprocesses", 0) is not None:
        return False
    if options.usepdb or options.trace or options.collectonly or options.capture == "no":
        return False
    return all(Path(config.invocation_params.dir, path).is_dir() for path in config.args)
