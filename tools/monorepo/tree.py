"""Command line: ``python -m monorepo.tree``. The shape of the source tree, checked."""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

from monorepo.workspace import REPOSITORY, load_workspace, read_toml

SMALL_LINES = 40
_NOT_A_CONCEPT = ("__init__", "__main__", "_version")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong with the tree of each package and tool; returns 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m monorepo.tree", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    root = parser.parse_args(arguments).root
    roots = import_roots(root)
    found = [
        problem
        for name, (folder, public) in roots.items()
        for problem in problems(name, folder, public)
    ]
    print("\n".join(found) or f"the trees of {len(roots)} packages and tools are in order")
    return 1 if found else 0


def import_roots(root: Path) -> dict[str, tuple[Path, set[str]]]:
    """The importable packages of the repository: source folder and modules that users import."""
    found = {}
    for package in load_workspace(root).distributions.values():
        table = read_toml(package.folder / "pyproject.toml")["tool"].get("mcore", {})
        public = {f"{package.module}.{name}" for name in table.get("public-modules", ())}
        found[package.module] = (package.source, public)
    for folder in sorted((root / "tools").glob("*/__init__.py")):
        found[folder.parent.name] = (folder.parents[1], set())
    return found


def problems(name: str, source: Path, public: set[str]) -> Iterator[str]:
    """What is wrong with one package, in a line each."""
    files = module_files(name, source)
    imports = imported_modules(name, source, files)
    yield from _circle(imports)
    yield from _small_modules(files, imports, public)
    yield from _equal_names(files)


def module_files(name: str, source: Path) -> dict[str, Path]:
    """The modules of a package with their files, without its tests."""
    found = {}
    for file in sorted((source / name.replace(".", "/")).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        if "tests" not in parts:
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported_modules(name: str, source: Path, files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of the package that each of them imports, anywhere in its text."""
    sys.path.insert(0, str(source))
    try:
        graph = grimp.build_graph(name, cache_dir=None)
    finally:
        sys.path.remove(str(source))
    below = graph.find_modules_directly_imported_by
    return {module: below(module) & set(files) for module in files}


def code_lines(text: str) -> int:
    """The lines of a source that hold code: no comment, no docstring, not blank."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def _circle(imports: Mapping[str, set[str]]) -> Iterator[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        yield f"{' <- '.join(error.args[1])}: an import circle; move what both need below them"


def _small_modules(
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


def _equal_names(files: Mapping[str, Path]) -> Iterator[str]:
    by_name: dict[str, list[str]] = {}
    for module, file in files.items():
        if file.stem not in _NOT_A_CONCEPT:
            by_name.setdefault(file.stem, []).append(module)
        elif file.stem == "__init__" and "." in module:
            by_name.setdefault(module.rpartition(".")[2], []).append(module)
    for name, modules in by_name.items():
        if len(modules) > 1:
            yield f"{' and '.join(modules)} share the name {name}; rename one"


if __name__ == "__main__":
    sys.exit(main())
