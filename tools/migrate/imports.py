"""Import statements of which some names move to other modules, with their layout kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node


def module_of(node: cst.ImportFrom) -> str | None:
    """The absolute module that names are imported from; None for a relative import."""
    if node.relative or node.module is None:
        return None
    return get_full_name_for_node(node.module)


def split(node: cst.ImportFrom, homes: Mapping[str, str]) -> list[cst.ImportFrom]:
    """The statements that import the same names, those in ``homes`` from their new modules."""
    aliases = node.names
    if isinstance(aliases, cst.ImportStar):
        return [node]
    modules = [homes.get(str(alias.evaluated_name)) for alias in aliases]
    parts = []
    for module in sorted(set(modules), key=lambda one: one or ""):  # what stays comes first
        chosen = [alias for alias, home in zip(aliases, modules, strict=True) if home == module]
        part = node if len(chosen) == len(aliases) else _with_names(node, chosen)
        if module is not None:
            part = part.with_changes(module=cst.parse_expression(module))
        parts.append(part)
    return parts


def alias_import(module: str, alias: str) -> cst.Import:
    """``import mcore.tensor as mcore_tensor``."""
    name = cst.ensure_type(cst.parse_expression(module), cst.Attribute)
    return cst.Import([cst.ImportAlias(name=name, asname=cst.AsName(name=cst.Name(alias)))])


def without(node: cst.Import, unused: Sequence[cst.ImportAlias]) -> cst.Import | None:
    """A plain import without some of its modules; None where none is left."""
    kept = [alias for alias in node.names if alias not in unused]
    if not kept:
        return None
    kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return node.with_changes(names=kept)


def without_names(node: cst.ImportFrom, unused: Sequence[cst.ImportAlias]) -> cst.ImportFrom | None:
    """A ``from`` import without some of its names; None where none is left."""
    if isinstance(node.names, cst.ImportStar):
        return node
    kept = [alias for alias in node.names if alias not in unused]
    return _with_names(node, kept) if kept else None


def _with_names(node: cst.ImportFrom, chosen: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    """The statement with some of its names only; what ended the last one ends the new last."""
    old = node.names
    if isinstance(old, cst.ImportStar):
        return node
    *names, last = chosen
    end = old[-1].comma
    if last is old[-1] or node.lpar is None or isinstance(end, cst.Comma):
        ended = last.with_changes(comma=_with_comment_of(end, last.comma))
        return node.with_changes(names=[*names, ended])
    ended = last.with_changes(comma=_at_the_end(last.comma))
    if isinstance(ended.comma, cst.Comma) and node.rpar is not None:
        bare = node.rpar.with_changes(whitespace_before=cst.SimpleWhitespace(""))
        return node.with_changes(names=[*names, ended], rpar=bare)
    return node.with_changes(names=[*names, ended])


_Comma = cst.Comma | cst.MaybeSentinel


def _with_comment_of(end: _Comma, comma: _Comma) -> _Comma:
    """What ended the list, with the comment behind the name that it now follows."""
    spaces = [one.whitespace_after if isinstance(one, cst.Comma) else None for one in (end, comma)]
    there, own = spaces
    if not isinstance(there, cst.ParenthesizedWhitespace):
        return _at_the_end(comma, end)
    if isinstance(end, cst.Comma):
        plain = cst.TrailingWhitespace()
        line = own.first_line if isinstance(own, cst.ParenthesizedWhitespace) else plain
        return end.with_changes(whitespace_after=there.with_changes(first_line=line))
    return end


def _at_the_end(comma: _Comma, end: _Comma = cst.MaybeSentinel.DEFAULT) -> _Comma:
    """What ended the list, unless a comment hangs on the comma."""
    space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    if isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment is not None:
        there = space.with_changes(last_line=cst.SimpleWhitespace(""))
        return comma.with_changes(whitespace_after=there)  # type: ignore[union-attr]
    return end


def aliases_of(node: cst.Import | cst.ImportFrom) -> Iterator[cst.ImportAlias]:
    """The names of an import; none for ``*``."""
    if not isinstance(node.names, cst.ImportStar):
        yield from node.names
