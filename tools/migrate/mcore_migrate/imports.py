"""Import statements with some names moved to other modules, in the same layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import libcst as cst
from libcst import matchers
from libcst.helpers import get_full_name_for_node

Import = cst.Import | cst.ImportFrom


def module_of(node: cst.ImportFrom, package: str) -> str | None:
    """The absolute module of a ``from`` import, None for a relative one outside of a package."""
    name = get_full_name_for_node(node.module) if node.module else ""
    return absolute("." * len(node.relative) + (name or ""), package)


def absolute(path: str, package: str) -> str | None:
    """A dotted path such as ``..utils.divide`` in a package as an absolute path."""
    name = path.lstrip(".")
    level = len(path) - len(name)
    if not level:
        return name
    parts = package.split(".")
    kept = parts[: len(parts) - level + 1] if package else []
    return ".".join([*kept, *([name] if name else [])]) if kept else None


def split(node: Import, homes: Mapping[str, str]) -> list[Import]:
    """Statements that import the same names, with names in ``homes`` from their new modules."""
    aliases = node.names
    if isinstance(aliases, cst.ImportStar):
        return [node]
    modules = [homes.get(str(alias.evaluated_name)) for alias in aliases]
    parts = []
    for module in sorted(set(modules), key=lambda one: one or ""):  # names that stay come first
        chosen = [alias for alias, home in zip(aliases, modules, strict=True) if home == module]
        part = node if len(chosen) == len(aliases) else _keep_names(node, chosen)
        if module is not None and isinstance(part, cst.ImportFrom):
            blank = cst.SimpleWhitespace(" ") if part.relative else part.whitespace_after_from
            part = part.with_changes(
                module=cst.parse_expression(module), relative=(), whitespace_after_from=blank
            )
        parts.append(part)
    return parts


def alias_import(module: str, alias: str) -> cst.Import:
    """``import mcore.tensor as mcore_tensor``."""
    name = cst.ensure_type(cst.parse_expression(module), cst.Attribute)
    return cst.Import([cst.ImportAlias(name=name, asname=cst.AsName(name=cst.Name(alias)))])


def without(node: Import, unused: Collection[cst.ImportAlias]) -> Import | None:
    """An import without some of its names, or None if none is left."""
    if not unused:
        return node
    kept = [alias for alias in aliases_of(node) if alias not in unused]
    return _keep_names(node, kept) if kept else None


def _keep_names(node: Import, chosen: Sequence[cst.ImportAlias]) -> Import:
    """The statement with only some of its names. The list ends as before."""
    (*_, end), (*names, last) = aliases_of(node), chosen
    return node.with_changes(names=[*names, last.with_changes(comma=end.comma)])


def has_comments(node: Import) -> bool:
    """Whether there are comments between the names of an import."""
    return bool(matchers.findall(node, matchers.Comment()))


def aliases_of(node: Import) -> Iterator[cst.ImportAlias]:
    """The names of an import, none for ``*``."""
    if not isinstance(node.names, cst.ImportStar):
        yield from node.names
