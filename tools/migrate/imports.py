"""Import statements with some names moved to other modules, in the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import libcst as cst
from libcst.helpers import get_full_name_for_node


def module_of(node: cst.ImportFrom) -> str | None:
    """The absolute module of a ``from`` import, or None for a relative import."""
    if node.relative or node.module is None:
        return None
    return get_full_name_for_node(node.module)


def split(node: cst.ImportFrom, homes: Mapping[str, str]) -> list[cst.ImportFrom]:
    """Statements that import the same names, with names in ``homes`` from their new modules."""
    aliases = node.names
    if isinstance(aliases, cst.ImportStar):
        return [node]
    modules = [homes.get(str(alias.evaluated_name)) for alias in aliases]
    parts = []
    for module in sorted(set(modules), key=lambda one: one or ""):  # names that stay come first
        chosen = [alias for alias, home in zip(aliases, modules, strict=True) if home == module]
        part = node if len(chosen) == len(aliases) else _keep_names(node, chosen)
        if module is not None:
            part = part.with_changes(module=cst.parse_expression(module))
        parts.append(part)
    return parts


def alias_import(module: str, alias: str) -> cst.Import:
    """``import mcore.tensor as mcore_tensor``."""
    name = cst.ensure_type(cst.parse_expression(module), cst.Attribute)
    return cst.Import([cst.ImportAlias(name=name, asname=cst.AsName(name=cst.Name(alias)))])


def without(node: cst.Import, unused: Sequence[cst.ImportAlias]) -> cst.Import | None:
    """A plain import without some of its modules, or None if none is left."""
    kept = [alias for alias in node.names if alias not in unused]
    if not kept:
        return None
    kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return node.with_changes(names=kept)


def without_names(node: cst.ImportFrom, unused: Sequence[cst.ImportAlias]) -> cst.ImportFrom | None:
    """A ``from`` import without some of its names, or None if none is left."""
    if isinstance(node.names, cst.ImportStar):
        return node
    kept = [alias for alias in node.names if alias not in unused]
    return _keep_names(node, kept) if kept else None


def _keep_names(node: cst.ImportFrom, chosen: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    """The statement with only some of its names. The list ends as before."""
    old = node.names
    if isinstance(old, cst.ImportStar):
        return node
    node, (*names, last) = _keep_comments_above(node, old, chosen)
    end = old[-1].comma
    if chosen[-1] is old[-1] or node.lpar is None or isinstance(end, cst.Comma):
        ended = last.with_changes(comma=_move_comment(end, last.comma))
        return node.with_changes(names=[*names, ended])
    ended = last.with_changes(comma=_end_list(last.comma))
    if isinstance(ended.comma, cst.Comma) and node.rpar is not None:
        bare = node.rpar.with_changes(whitespace_before=cst.SimpleWhitespace(""))
        return node.with_changes(names=[*names, ended], rpar=bare)
    if node.rpar is not None:  # a comment before it is about the last of the old names
        space = node.rpar.whitespace_before
        if isinstance(space, cst.ParenthesizedWhitespace):
            space = space.with_changes(first_line=cst.TrailingWhitespace())
        node = node.with_changes(rpar=node.rpar.with_changes(whitespace_before=space))
    return node.with_changes(names=[*names, ended])


_Comma = cst.Comma | cst.MaybeSentinel


def _keep_comments_above(
    node: cst.ImportFrom, old: Sequence[cst.ImportAlias], chosen: Sequence[cst.ImportAlias]
) -> tuple[cst.ImportFrom, list[cst.ImportAlias]]:
    """The statement's beginning and the names, each with the comments above it."""
    if node.lpar is None:
        return node, [*chosen]
    begin = node.lpar.whitespace_after
    commas = [one.comma for one in old[:-1]]
    spaces = [begin, *(one.whitespace_after for one in commas if isinstance(one, cst.Comma))]
    above = dict(zip(map(id, old), spaces, strict=True))
    lpar = node.lpar.with_changes(whitespace_after=_place_above(above[id(chosen[0])], begin))
    names = []
    for one, following in pairwise(chosen):
        comma = cst.ensure_type(one.comma, cst.Comma)
        space = _place_above(above[id(following)], comma.whitespace_after)
        names.append(one.with_changes(comma=comma.with_changes(whitespace_after=space)))
    return node.with_changes(lpar=lpar), [*names, chosen[-1]]


def _place_above(
    wanted: cst.BaseParenthesizableWhitespace, own: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """The space after a token, with the comment lines above the name that now follows."""
    lines = wanted.empty_lines if isinstance(wanted, cst.ParenthesizedWhitespace) else ()
    if isinstance(own, cst.ParenthesizedWhitespace):
        return own.with_changes(empty_lines=lines)
    return wanted.with_changes(first_line=cst.TrailingWhitespace()) if lines else own


def _move_comment(end: _Comma, comma: _Comma) -> _Comma:
    """The end of the list, with the comment of the name that is now the last."""
    spaces = [one.whitespace_after if isinstance(one, cst.Comma) else None for one in (end, comma)]
    there, own = spaces
    if not isinstance(there, cst.ParenthesizedWhitespace):
        return _end_list(comma, end)
    if isinstance(end, cst.Comma):
        plain = cst.TrailingWhitespace()
        line = own.first_line if isinstance(own, cst.ParenthesizedWhitespace) else plain
        return end.with_changes(whitespace_after=there.with_changes(first_line=line))
    return end


def _end_list(comma: _Comma, end: _Comma = cst.MaybeSentinel.DEFAULT) -> _Comma:
    """The end of the list, unless the comma has a comment."""
    space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    if isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment is not None:
        there = space.with_changes(empty_lines=(), last_line=cst.SimpleWhitespace(""))
        return comma.with_changes(whitespace_after=there)  # type: ignore[union-attr]
    return end


def aliases_of(node: cst.Import | cst.ImportFrom) -> Iterator[cst.ImportAlias]:
    """The names of an import, none for ``*``."""
    if not isinstance(node.names, cst.ImportStar):
        yield from node.names
