"""The examples in docstrings do what they show, in every module of the packages and the tools."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def module_names() -> list[str]:
    """Names of all modules, from their files: importing them here would delay every test run.

    What extends other libraries runs where these are loaded: ``adapter_programs``, the examples'
    and the site's own tests.
    """
    elsewhere = {"tests", "adapters", "examples", "docs"}
    sources = [*sorted((ROOT / "packages").glob("*/src")), ROOT / "tools"]
    names = []
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            if parts[-1] != "__main__" and not elsewhere & set(parts):
                names.append(".".join(part for part in parts if part != "__init__"))
    return names


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for docstring in doctest.DocTestFinder().find(module):
        if docstring.examples:  # a run without any takes as long as one with an example
            runner.run(docstring)
    assert runner.summarize().failed == 0


def test_the_list_of_modules_is_whole() -> None:
    names = module_names()
    assert {"mcore.versioning", "mcore.observe.sinks.jsonl", "rank_testing.launch"} <= set(names)
    assert len(names) == len(set(names))
