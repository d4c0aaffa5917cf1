"""The decorators of mcore.versioning on an object, read without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import griffe
from packaging.version import InvalidVersion, Version

EXEMPTING = frozenset({"internal_api", "experimental_api", "experimental_fn", "experimental_cls"})
DECORATORS = "mcore.versioning."
_EXTRA = "api_check"


class PropertyDecorators(griffe.Extension):
    """Keeps the decorators of properties, which griffe drops when it makes attributes of them."""

    def on_attribute_instance(
        self, *, node: Any, attr: griffe.Attribute, agent: Any, **_: Any
    ) -> None:
        """Store the decorators of an attribute that the source defines as a function."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            attr.extra[_EXTRA]["decorators"] = [
                griffe.Decorator(value, lineno=each.lineno, endlineno=each.end_lineno)
                for each in node.decorator_list
                if (value := griffe.safe_get_expression(each, parent=agent.current)) is not None
            ]


@dataclass(frozen=True)
class Marks:
    """The decorators that limit the promise to users.

    Attributes:
        exempt: The exempting decorators, sorted.
        removal_version: The version from which it may be gone.
        unreadable: The source of a removal version that is not a literal version.
    """

    exempt: tuple[str, ...] = ()
    removal_version: Version | None = None
    unreadable: str | None = None


def read_marks(found: griffe.Object | griffe.Alias | None) -> Marks:
    """Read the decorators of an object itself, not of its base classes."""
    named = [(_name_decorator(one), one) for one in _list_decorators(found)]
    exempt = tuple(sorted({name for name, _ in named if name in EXEMPTING}))
    first = next((one for name, one in named if name == "deprecated"), None)
    if first is None:
        return Marks(exempt)
    source = _read_argument(first, 1, "removal_version")
    try:
        literal = None if source is None else ast.literal_eval(source)
        removal = None if literal is None else Version(literal)
    except (ValueError, SyntaxError, TypeError, InvalidVersion):
        return Marks(exempt, unreadable=source)
    return Marks(exempt, removal_version=removal)


def _list_decorators(found: griffe.Object | griffe.Alias | None) -> list[griffe.Decorator]:
    if isinstance(found, griffe.Alias):
        found = found.final_target
    if isinstance(found, griffe.Function | griffe.Class):
        return found.decorators
    if isinstance(found, griffe.Attribute):
        kept: list[griffe.Decorator] = found.extra.get(_EXTRA, {}).get("decorators", [])
        return kept
    return []


def _name_decorator(decorator: griffe.Decorator) -> str | None:
    """The name within mcore.versioning, under any import alias."""
    path = decorator.callable_path
    return path.rpartition(".")[2] if path.startswith(DECORATORS) else None


def _read_argument(decorator: griffe.Decorator, position: int, name: str) -> str | None:
    """The source of an argument, or None if it is not given."""
    call = decorator.value
    if not isinstance(call, griffe.ExprCall):
        return None
    for index, argument in enumerate(call.arguments):
        if isinstance(argument, griffe.ExprKeyword):
            if argument.name == name:
                return str(argument.value)
        elif isinstance(argument, griffe.ExprVarPositional | griffe.ExprVarKeyword) or (
            index == position
        ):
            return str(argument)
    return None
