"""The rewriting of imports on the sources of the peers, which nobody wrote for it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_migrate.files import python_files, read
from mcore_migrate.rewrite import rewrite
from mcore_migrate.table import read_table

TABLE = read_table()


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


def imports_of(source: bytes) -> Iterator[tuple[str, str]]:
    """What a source imports from the packages."""
    for node in ast.walk(ast.parse(source)):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and module.startswith("mcore."):
            yield from ((module, one.name) for one in node.names)
