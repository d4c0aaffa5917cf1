"""What each package declares, against what its source imports, both ways, and its tests."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from packaging.utils import canonicalize_name

from monorepo.isolation.run import TEST_TOOL
from monorepo.workspace import Distribution, Workspace

# Modules that import a library of another distribution for their caller.
FACADES = {"torch.utils.tensorboard": "tensorboard"}
# Every type checker brings it, and no interpreter has it.
STUBS_ONLY = "_typeshed"


def problems(workspace: Workspace) -> Iterator[str]:
    """Every disagreement, in a line each."""
    for package in workspace.distributions.values():
        yield from disagreements(workspace, package)


def disagreements(workspace: Workspace, package: Distribution) -> Iterator[str]:
    """Yield what a package imports without declaring it, and declares without importing it.

    A dependency that only an extra brings may be imported in functions and for type checkers, and
    while a module loads only where ``require_extra`` is called with the extra's name before. The
    same holds for modules that no index has, which the package names under ``[tool.monorepo]
    not-on-an-index``.
    """
    required: set[str] = {canonicalize_name(one.name) for one in package.dependencies}
    optional = _optional(package)
    used: set[str] = set()
    for imported in imported_names(package.source):
        if imported.moment is Moment.TYPING and _is_within(imported.name, STUBS_ONLY):
            continue
        for providers in provided_by(workspace, package, imported.name):
            used |= providers
            place = f"{imported.file.relative_to(workspace.root)}:{imported.line}"
            brought = _demanded_extras(imported.file)
            allowed = required | {name for name in optional if optional[name] in brought}
            yield from _judge(imported, providers, place, allowed, optional)
    pyproject = (package.folder / "pyproject.toml").relative_to(workspace.root)
    for name in sorted(required - used):
        yield f"{pyproject}: {name} is declared, but nothing imports it"
    for name in sorted(set(optional) - used):
        yield f"{pyproject}: {name} is declared by {optional[name]}, but nothing imports it"
    yield from _undeclared_by_tests(workspace, package, required | set(optional))


@functools.cache
def _demanded_extras(file: Path) -> frozenset[str]:
    """The extras without which a module refuses to be imported, as :func:`_optional` words them."""
    calls = [
        node.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    named = [call.args[0] for call in calls if _called(call) == "require_extra" and call.args]
    return frozenset(f"extra {one.value!s}" for one in named if isinstance(one, ast.Constant))


def _undeclared_by_tests(
    workspace: Workspace, package: Distribution, declared: Set[str]
) -> Iterator[str]:
    """Yield what test modules need for their import and the group ``test`` does not bring."""
    folder = package.folder / "tests"
    beside = {TEST_TOOL, *(file.stem for file in folder.rglob("*.py"))}
    brought = declared | {canonicalize_name(one.name) for one in package.test_dependencies}
    for imported in imported_names(folder):
        if imported.moment is not Moment.LOADING or imported.name.partition(".")[0] in beside:
            continue
        for providers in provided_by(workspace, package, imported.name):
            if not providers & brought:
                place = f"{imported.file.relative_to(workspace.root)}:{imported.line}"
                yield (
                    f"{place}: {imported.name} needs {_either(providers)}, which the dependency "
                    "group test does not bring"
                )


def _optional(package: Distribution) -> dict[str, str]:
    """What declares each distribution that an installation may lack."""
    declared: dict[str, str] = {
        canonicalize_name(one.name): f"extra {extra}"
        for extra, requirements in package.extras.items()
        for one in requirements
    }
    free = map(canonicalize_name, package.not_on_an_index)
    return {**declared, **dict.fromkeys(free, "not-on-an-index")}


def _judge(
    imported: ImportedName,
    providers: Set[str],
    place: str,
    required: Set[str],
    optional: Mapping[str, str],
) -> Iterator[str]:
    if providers & required:
        return
    found = providers & set(optional)
    if not found:
        yield f"{place}: {imported.name} needs {_either(providers)}, which is not declared"
    elif imported.moment is Moment.LOADING:
        yield (
            f"{place}: {imported.name} belongs to {optional[min(found)]} and is imported "
            f"{imported.moment.value}; import it in the function that needs it"
        )


# Namespaces of distributions that need not be installed here.
_NAMESPACES = {"megatron": ["megatron-core"]}
# Python's own of 3.14, which the one that runs this may lack.
_NEWER = ("annotationlib",)


def provided_by(workspace: Workspace, package: Distribution, name: str) -> list[set[str]]:
    """One set of alternatives for each distribution to declare for an imported name."""
    for sibling in workspace.distributions.values():
        if _is_within(name, sibling.module):
            return [] if sibling.name == package.name else [{sibling.name}]
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in _NEWER:
        return []
    found = _installed_providers().get(top) or _NAMESPACES.get(top) or [top]
    facades = [{library} for module, library in FACADES.items() if _is_within(name, module)]
    return [{canonicalize_name(one) for one in found}, *facades]


@functools.cache
def _installed_providers() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _is_within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def _either(names: Set[str]) -> str:
    return " or ".join(sorted(names))


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
