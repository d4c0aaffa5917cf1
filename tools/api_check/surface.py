"""The public names of a package, by the paths that users import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

import griffe

from api_check.lifecycle_marks import PropertyDecorators
from monorepo.workspace import Distribution, read_toml

_UNPROMISED = frozenset({"__version__", "__all__"})


class CannotCheckError(RuntimeError):
    """The comparison could not be made."""


@dataclass(frozen=True)
class Entry:
    """A public name.

    Attributes:
        path: The public path.
        owner: The public path of the module or class that has it.
        name: The last part of the path.
        found: Its definition, or None if another distribution or the running program makes it.
        target: The path of the definition.
        top_level: Whether its owner is a module.
    """

    path: str
    owner: str
    name: str
    found: griffe.Object | None
    target: str
    top_level: bool


@dataclass(frozen=True)
class Surface:
    """Everything public in one package.

    Attributes:
        module: The module of the package as griffe read it.
        entries: Every public name by its public path, owners before what they own.
        modules: The public modules by their paths.
    """

    module: griffe.Module
    entries: dict[str, Entry] = field(default_factory=dict)
    modules: dict[str, griffe.Module] = field(default_factory=dict)

    def defines(self, path: str) -> bool:
        """Whether a full path is still defined, public or not."""
        inside = path.removeprefix(f"{self.module.path}.")
        if inside == path:
            return False
        try:
            found = self.module[inside]
        except (KeyError, griffe.GriffeError):
            return False
        return not found.is_alias or resolve(found) is not None


def read_surface(package: Distribution) -> Surface:
    """Read what is public, without importing anything.

    Public are: the names in ``__all__``, subpackages with an ``__all__``, the modules in
    ``[tool.mcore] public-modules``, and members of public classes. In a module without ``__all__``,
    names without an underscore that it defines are public.
    """
    for file in sorted(package.source.rglob("*.py")):
        try:
            ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        except (SyntaxError, ValueError) as error:
            shown = file.relative_to(package.folder)
            raise CannotCheckError(f"{package.name}: cannot parse {shown}: {error}") from error
    loader = griffe.GriffeLoader(
        search_paths=[package.source],
        extensions=griffe.load_extensions(PropertyDecorators),
        allow_inspection=False,
    )
    try:
        module = loader.load(package.module)
        loader.resolve_aliases(implicit=False, external=False)
    except (griffe.GriffeError, ImportError) as error:
        raise CannotCheckError(f"{package.name}: cannot read {package.module}: {error}") from None
    if not isinstance(module, griffe.Module):
        raise CannotCheckError(f"{package.name}: {package.module} is not a module")
    surface = Surface(module)
    _add_module(surface, module)
    table = read_toml(package.folder / "pyproject.toml")
    for name in table.get("tool", {}).get("mcore", {}).get("public-modules", ()):
        listed = module[name]
        if f"{module.path}.{name}" not in surface.modules and isinstance(listed, griffe.Module):
            _add_module(surface, listed)
    return surface


def resolve(found: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """The target of an alias, or None if it is outside the package."""
    if not isinstance(found, griffe.Alias):
        return found
    try:
        return found.final_target
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def _add_module(surface: Surface, module: griffe.Module) -> None:
    surface.modules[module.path] = module
    for name in _list_public_names(module):
        member = module.members.get(name)
        path = f"{module.path}.{name}"
        if isinstance(member, griffe.Module):
            surface.entries[path] = Entry(path, module.path, name, member, path, True)
            _add_module(surface, member)
        else:
            _add(surface, module.path, name, member, top_level=True)
    for name, member in module.members.items():
        known = f"{module.path}.{name}" in surface.modules
        if isinstance(member, griffe.Module) and not known and _is_open(member, module):
            _add_module(surface, member)


def _list_public_names(module: griffe.Module) -> list[str]:
    if module.exports is not None:
        return sorted({str(name) for name in module.exports} - _UNPROMISED)
    return [
        name
        for name, member in module.members.items()
        if name not in _UNPROMISED
        and not name.startswith("_")
        and not isinstance(member, griffe.Module)
        and not member.is_alias
    ]


def _is_open(member: griffe.Module, parent: griffe.Module) -> bool:
    if member.name.startswith("_"):
        return False
    return (member.is_init_module and member.exports is not None) or parent.exports is None


def _add(
    surface: Surface, owner: str, name: str, member: griffe.Object | griffe.Alias | None, *,
    top_level: bool,
) -> None:  # fmt: skip
    path = f"{owner}.{name}"
    found = None if member is None else resolve(member)
    target = member.target_path if isinstance(member, griffe.Alias) else path
    if found is not None:
        target = found.path
    surface.entries[path] = Entry(path, owner, name, found, target, top_level)
    inherited = isinstance(member, griffe.Alias) and member.inherited
    if isinstance(found, griffe.Class) and not inherited:  # it may inherit from its owner
        for inner, each in _class_members(found):
            _add(surface, path, inner, each, top_level=False)


def _class_members(cls: griffe.Class) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    for name, member in cls.all_members.items():
        special = name.startswith("__") and name.endswith("__")
        imported = isinstance(member, griffe.Alias) and not member.inherited
        if (special or not name.startswith("_")) and not imported:
            yield name, member
