"""The shape of the source tree: import circles and equal names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

from monorepo.workspace import Workspace

_NOT_A_CONCEPT = ("__init__", "__main__", "_version")


def import_roots(workspace: Workspace) -> dict[str, Path]:
    """The importable packages of the repository, tools included, with their folder on the path."""
    found = {package.module: package.source for package in workspace.distributions.values()}
    for folder in sorted((workspace.root / "tools").glob("*/__init__.py")):
        found[folder.parent.name] = folder.parents[1]
    return found


def problems(roots: Mapping[str, Path]) -> Iterator[str]:
    """Faults of the packages, a line each."""
    files = {name: module_files(name, source) for name, source in roots.items()}
    every = {module: file for modules in files.values() for module, file in modules.items()}
    try:
        TopologicalSorter(imported_modules(roots, every)).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
        yield f"{circle}: an import circle; move the shared code below both"
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


def imported_modules(roots: Mapping[str, Path], files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of the roots that each module imports, anywhere in its text."""
    # grimp finds packages on the path, but does not import them.
    sources = sorted(set(map(str, roots.values())))
    sys.path[:0] = sources
    try:
        below = grimp.build_graph(*roots, cache_dir=None).find_modules_directly_imported_by
    finally:
        del sys.path[: len(sources)]
    return {module: below(module) & set(files) for module in files}


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
