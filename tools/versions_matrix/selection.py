"""Which test files can run where only the package and a few test tools are installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path


def left_out(folder: Path, provided: Collection[str]) -> dict[str, list[str]]:
    """Name the test files that import something else than the standard library and `provided`.

    Only what a file imports at its top counts: that is where a test file states its needs.

    Args:
        folder: The folder with the test files.
        provided: Names of importable top-level modules.

    Returns:
        For each file that has to be left out, what it needs.
    """
    needs = {file.name: _foreign_imports(file, provided) for file in folder.glob("test_*.py")}
    return {name: sorted(modules) for name, modules in sorted(needs.items()) if modules}


def _foreign_imports(file: Path, provided: Collection[str]) -> set[str]:
    names = set(_imported_names(ast.parse(file.read_text(encoding="utf-8"))))
    return names - set(sys.stdlib_module_names) - set(provided)


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
