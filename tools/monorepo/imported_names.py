"""What the source of a package imports, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_BY_NAME = ("import_module", "__import__")


class Moment(Enum):
    """When an import happens."""

    LOADING = "when the module is imported"
    CALLING = "when a function runs"
    TYPING = "for type checkers only"


@dataclass(frozen=True)
class ImportedName:
    """One imported name.

    Attributes:
        name: Full dotted name; of ``from a.b import c`` it is ``a.b.c``.
        file: Where it is imported.
        line: In which line.
        moment: When.
    """

    name: str
    file: Path
    line: int
    moment: Moment


def imported_names(folder: Path) -> Iterator[ImportedName]:
    """Find every absolute import in the Python files of a folder and its subfolders.

    Imports in functions and under ``TYPE_CHECKING`` count, and so do ``importlib.import_module``
    and ``__import__`` of a text or of a constant of the module.

    Args:
        folder: Where to look.
    """
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        constants = _text_constants(tree)
        for node, moment in _with_moments(tree, Moment.LOADING):
            for name in _names(node, constants):
                yield ImportedName(name, file, getattr(node, "lineno", 0), moment)


def _with_moments(node: ast.AST, moment: Moment) -> Iterator[tuple[ast.AST, Moment]]:
    """Every node below one, with the moment at which it is run."""
    yield node, moment
    parts: list[tuple[ast.AST, Moment]]
    if isinstance(node, ast.If) and _asks_for_typing(node.test):
        parts = [(child, Moment.TYPING) for child in node.body]
        parts += [(child, moment) for child in node.orelse]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        body = node.body if isinstance(node.body, list) else [node.body]
        later = Moment.CALLING if moment is Moment.LOADING else moment
        others = [child for child in ast.iter_child_nodes(node) if child not in body]
        parts = [(child, later) for child in body] + [(child, moment) for child in others]
    else:
        parts = [(child, moment) for child in ast.iter_child_nodes(node)]
    for child, when in parts:
        yield from _with_moments(child, when)


def _asks_for_typing(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _names(node: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and _called(node) in _BY_NAME:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value
        elif isinstance(first, ast.Name) and first.id in constants:
            yield constants[first.id]


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text_constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module assigns to names at its top."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
