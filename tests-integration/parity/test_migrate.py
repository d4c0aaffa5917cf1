"""The rewriting of imports on the sources of the peers, which nobody wrote for it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_migrate.files import python_files, read
from mcore_migrate.rewrite import rewrite
from mcore_migrate.serving import _compare_order
from mcore_migrate.table import read_table

TABLE = read_table()
ROOTS = {"core": "megatron.core", "fsdp": "megatron_fsdp", "Bridge": "megatron.bridge"}
_RELEASES = re.compile(r"(by keyword )?(core|fsdp|Bridge) ([\d.]+)(?: to ([\d.]+))?")


def number(release: str) -> tuple[int, ...]:
    """The first two numbers of a release."""
    return tuple(map(int, release.split(".")[:2]))


@pytest.mark.parametrize(("package", "at_least"), [("megatron.core", 40), ("megatron_fsdp", 2)])
def test_a_package(package: str, at_least: int) -> None:
    """Every rewritten file parses, what it imports is there, and a second run changes nothing."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    results = [result for file in python_files(folders) if (result := read(file, TABLE))]
    rewritten = [result.after for result in results if result.after and result.differs]
    assert not [result for result in results if result.error]
    assert len(rewritten) >= at_least
    for one in rewritten:
        for module, name in imports_of(one.source):
            assert hasattr(importlib.import_module(module), name)
        assert rewrite(one.source, TABLE).source == one.source


@pytest.mark.parametrize(("kind", "least"), [("core", 100), ("fsdp", 20)])
def test_rows_of_the_page_hold_for_the_installed_releases(kind: str, least: int) -> None:
    number_of_rows, wrong = compare_rows(kind)
    assert number_of_rows >= least
    assert wrong == []


def compare_rows(kind: str) -> tuple[int, list[object]]:
    """The number of rows of a package of Megatron, and those that its release contradicts.

    They differ in the names, or in the positions of their arguments.
    """
    installed = number(importlib.metadata.version(f"megatron-{kind.lower()}"))
    found: dict[tuple[str, str, str], set[str]] = {}
    for path, home in TABLE.homes.items():
        module, _, name = path.rpartition(".")
        if not module.startswith(ROOTS[kind]):
            continue
        row = found.setdefault((name, home.module, home.releases), set())
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            theirs = getattr(importlib.import_module(module), name)
            ours = getattr(importlib.import_module(home.module), name)
            row.add("by keyword " if _compare_order(theirs, ours) else "same")
    wrong: list[object] = []
    for (name, _, releases), states in found.items():
        stated = {
            order or "same"
            for order, package, first, last in _RELEASES.findall(releases)
            if package == kind and number(first) <= installed <= number(last or first)
        }
        wrong += [(name, sorted(states), releases)] if states != stated else []
    return len(found), wrong


def imports_of(source: bytes) -> Iterator[tuple[str, str]]:
    """What a source imports from the packages."""
    for node in ast.walk(ast.parse(source)):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and module.startswith("mcore."):
            yield from ((module, one.name) for one in node.names)
