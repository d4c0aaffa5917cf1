"""Declared dependencies of each package, compared with the imports in its source."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from monorepo.workspace import Distribution, Workspace

# Modules that import a library of another distribution for their caller.
_FACADES = {"torch.utils.tensorboard": "tensorboard"}
# Namespaces of distributions that need not be installed here.
_NAMESPACES = {"megatron": ["megatron-core"]}
# In the standard library since 3.14, known to type checkers only, and an optional kernel of Apex,
# which no index has.
_WITHOUT_DISTRIBUTION = ("annotationlib", "_typeshed", "fused_weight_gradient_mlp_cuda")
_BY_NAME = ("import_module", "__import__")
_list_installed = functools.cache(importlib.metadata.packages_distributions)


class ImportedName(NamedTuple):
    """One imported name: ``a.b.c`` for ``from a.b import c``.

    Attributes:
        name: The name.
        file: The module that imports it.
        line: The line in it.
        late: Whether a function or only a type checker imports it.
    """

    name: str
    file: Path
    line: int
    late: bool


def problems(workspace: Workspace) -> Iterator[str]:
    """Every disagreement, a line each."""
    for package in workspace.distributions.values():
        yield from check_package(workspace, package)


def check_package(workspace: Workspace, package: Distribution) -> Iterator[str]:
    """Yield undeclared imports of a package, and declarations that nothing imports.

    A dependency of an extra may be imported in functions and for type checkers. A module may
    import it at its top only after a call of ``require_extra`` with the extra's name.
    """
    required: set[str] = {canonicalize_name(one.name) for one in package.dependencies}
    optional: dict[str, str] = {
        canonicalize_name(one.name): f"extra {extra}"
        for extra, requirements in package.extras.items()
        for one in requirements
    }
    used: set[str] = set()
    for imported in find_imports(package.source):
        for providers in find_providers(workspace, package, imported.name):
            used |= providers
            extras = _find_required_extras(imported.file)
            allowed = required | {name for name in optional if optional[name] in extras}
            named = providers & optional.keys()
            place = f"{imported.file.relative_to(workspace.root)}:{imported.line}: {imported.name}"
            if providers & allowed:
                continue
            if not named:
                yield f"{place} needs {' or '.join(sorted(providers))}, which is not declared"
            elif not imported.late:
                yield (
                    f"{place} belongs to {optional[min(named)]} and is imported when the module "
                    "is; import it in the function that needs it"
                )
    declared: dict[str, str] = dict.fromkeys(sorted(required), "")
    declared.update(sorted(optional.items()))
    pyproject = (package.folder / "pyproject.toml").relative_to(workspace.root)
    for name, extra in declared.items():
        if name not in used:
            by = f" by {extra}" if extra else ""
            yield f"{pyproject}: {name} is declared{by}, but nothing imports it"


@functools.cache
def _find_required_extras(file: Path) -> frozenset[str]:
    """The extras without which a module refuses to be imported, as ``extra NAME``."""
    calls = [
        node.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    named = [call.args[0] for call in calls if _name_call(call) == "require_extra" and call.args]
    return frozenset(f"extra {one.value!s}" for one in named if isinstance(one, ast.Constant))


def find_providers(workspace: Workspace, package: Distribution, name: str) -> list[set[str]]:
    """One set of alternatives for each distribution to declare for an imported name."""
    for sibling in workspace.distributions.values():
        if _is_within(name, sibling.module):
            return [] if sibling.name == package.name else [{sibling.name}]
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in _WITHOUT_DISTRIBUTION:
        return []
    found = _list_installed().get(top) or _NAMESPACES.get(top) or [top]
    facades = [{library} for module, library in _FACADES.items() if _is_within(name, module)]
    return [{canonicalize_name(one) for one in found}, *facades]


def _is_within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def find_imports(folder: Path) -> Iterator[ImportedName]:
    """Find every absolute import in the Python files of a folder and its subfolders.

    Imports in functions and under ``TYPE_CHECKING`` count. So do ``importlib.import_module`` and
    ``__import__`` of a string or of a string constant of the module.
    """
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node, late in _walk(tree, late=False):
            for name in _list_names(node, constants):
                yield ImportedName(name, file, getattr(node, "lineno", 0), late)


def _walk(node: ast.AST, *, late: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below a node, and whether it runs after the import of its module, or never."""
    yield node, late
    body: list[ast.AST] = []
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        body = [*node.body]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        body = [*node.body] if isinstance(node.body, list) else [node.body]
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, late=late or child in body)


def _list_names(node: ast.AST, constants: Mapping[str, object]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and _name_call(node) in _BY_NAME:
        first = node.args[0]
        value = getattr(first, "value", None)
        if isinstance(first, ast.Name):
            value = constants.get(first.id)
        if isinstance(value, str):
            yield value


def _name_call(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]
