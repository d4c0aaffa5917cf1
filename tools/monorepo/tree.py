"""The shape of the source tree: import circles, small modules, equal names."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import grimp

from monorepo.workspace import Workspace, read_toml

SMALL_LINES = 36
_NOT_A_CONCEPT = ("__init__", "__main__", "_version")


class Root(NamedTuple):
    """An importable package: its folder on the path, and the modules that users import by name."""

    source: Path
    public: set[str]


def import_roots(workspace: Workspace) -> dict[str, Root]:
    """The importable packages of the repository, tools included."""
    found = {}
    for package in workspace.distributions.values():
        table = read_toml(package.folder / "pyproject.toml")["tool"].get("mcore", {})
        public = {f"{package.module}.{name}" for name in table.get("public-modules", ())}
        found[package.module] = Root(package.source, public)
    for folder in sorted((workspace.root / "tools").glob("*/__init__.py")):
        found[folder.parent.name] = Root(folder.parents[1], set())
    return found


def problems(roots: Mapping[str, Root]) -> Iterator[str]:
    """Faults of the packages, a line each."""
    files = {name: module_files(name, root.source) for name, root in roots.items()}
    every = {module: file for modules in files.values() for module, file in modules.items()}
    imports = imported_modules(roots, every)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
        yield f"{circle}: an import circle; move the shared code below both"
    public = {one for root in roots.values() for one in root.public}
    yield from _find_small_modules(every, imports, public)
    for modules in files.values():
        yield from _find_equal_names(modules)


def module_files(name: str, source: Path) -> dict[str, Path]:
    """The modules of a package with their files, without its tests."""
    found = {}
    for file in sorted((source / name.replace(".", "/")).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        if "tests" not in parts and (file.parent / "__init__.py").exists():
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported_modules(roots: Mapping[str, Root], files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of the roots that each module imports, anywhere in its text."""
    # grimp finds packages on the path, but does not import them.
    sources = sorted({str(root.source) for root in roots.values()})
    sys.path[:0] = sources
    try:
        below = grimp.build_graph(*roots, cache_dir=None).find_modules_directly_imported_by
    finally:
        del sys.path[: len(sources)]
    return {module: below(module) & set(files) for module in files}


def code_lines(text: str) -> int:
    """The number of lines on which a statement or an expression begins, but no docstring."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.stmt, ast.expr))]
    texts = [
        node
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return len({node.lineno for node in nodes} - {node.lineno for node in texts})


def _find_small_modules(
    files: Mapping[str, Path], imports: Mapping[str, set[str]], public: set[str]
) -> Iterator[str]:
    for module, file in files.items():
        importers = [other for other, below in imports.items() if module in below]
        if file.stem in _NOT_A_CONCEPT or module in public or len(importers) != 1:
            continue
        if files[importers[0]].stem == "__init__":
            continue  # users import its names from there
        lines = code_lines(file.read_text(encoding="utf-8"))
        if lines < SMALL_LINES:
            yield f"{module}: {lines} lines of code for {importers[0]} alone; merge it into that"


def _find_equal_names(files: Mapping[str, Path]) -> Iterator[str]:
    by_name: dict[str, list[str]] = {}
    for module, file in files.items():
        if file.stem not in _NOT_A_CONCEPT:
            by_name.setdefault(file.stem, []).append(module)
        elif file.stem == "__init__" and "." in module:
            by_name.setdefault(module.rpartition(".")[2], []).append(module)
    for name, modules in by_name.items():
        if len(modules) > 1:
            yield f"{' and '.join(modules)} share the name {name}; rename one"
