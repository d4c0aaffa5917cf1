"""Rewrite one file's source: imports, uses through a module, and the strings of patches."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst
from libcst.metadata import MetadataWrapper

from .findings import Findings, Note
from .imports import Import, alias_import, split, without
from .table import Home, Table

_BLANKS = b" \t\f\r\n"
# Comments that apply to every statement made of an import.
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pylint:|pyright:|ruff:|pragma:|fmt: *skip|isort: *skip)")


class LayoutError(ValueError):
    """A source that cannot be kept byte for byte."""


@dataclass
class Rewritten:
    """A file after the rewriting.

    Attributes:
        source: Its bytes.
        moved: The new places of its names.
        notes: Places to check, by line.
        stays: Names that it still imports from the old modules, since no package has them.
        shifts: Line numbers before the rewriting, and the number of lines added after each.
    """

    source: bytes
    moved: set[Home] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
    stays: set[str] = field(default_factory=set)
    shifts: list[tuple[int, int]] = field(default_factory=list)

    def placed(self) -> Rewritten:
        """The same, with the notes' line numbers after the rewriting."""
        notes = [
            replace(one, line=one.line + sum(more for at, more in self.shifts if at < one.line))
            for one in self.notes
        ]
        return replace(self, notes=notes, shifts=[])


def rewrite(source: bytes, table: Table, package: str = "") -> Rewritten:
    """Rewrite the source of a file in a package. All other bytes stay.

    Raises:
        libcst.ParserSyntaxError: It is not Python.
        LayoutError: It cannot be kept byte for byte.
    """
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    if _end_like(source, wrapper.module.bytes) != source:
        raise LayoutError("it has blanks that would not be kept: rewrite it yourself")
    found = Findings(table, package)
    wrapper.visit(found)
    notes = sorted(dict.fromkeys(found.notes), key=lambda one: one.line)
    rewriter = _Rewriter(found)
    if found.changes:
        source = _end_like(source, wrapper.module.visit(rewriter).bytes)
    return Rewritten(source, found.moved, notes, found.stays, rewriter.shifts)


def _end_like(source: bytes, text: bytes) -> bytes:
    """A text with the byte order mark and the end of its source. LibCST may drop both."""
    begin = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    end = source[len(source.rstrip(_BLANKS)) :]
    return begin + text.removeprefix(codecs.BOM_UTF8).rstrip(_BLANKS) + end


class _Rewriter(cst.CSTTransformer):
    """Makes the changes of :class:`Findings`."""

    def __init__(self, found: Findings) -> None:
        super().__init__()
        self._found = found
        self.shifts: list[tuple[int, int]] = []

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        home = self._found.uses.get(original_node)
        if home is None:
            return updated_node
        return updated_node.with_changes(value=cst.Name(self._found.alias_of(home.module)))

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.BaseExpression:
        text = self._found.texts.get(original_node)
        if text is None:
            return updated_node
        head, quote = original_node.prefix, original_node.quote
        return updated_node.with_changes(value=f"{head}{quote}{text}{quote}")

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        body = self._rewrite_body(original_node.body, updated_node.body)
        lines = _make_lines(body, updated_node, is_one=len(original_node.body) > 1)
        if original_node in self._found.lines:
            more = _count_lines(lines) - _count_lines([original_node])
            self.shifts.append((self._found.lines[original_node], more))
        return cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        body = self._rewrite_body(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body)

    def _rewrite_body(
        self, original: Sequence[cst.BaseSmallStatement], updated: Sequence[cst.BaseSmallStatement]
    ) -> list[cst.BaseSmallStatement]:
        """The small statements of a line, with the imports among them replaced."""
        body: list[cst.BaseSmallStatement] = []
        for before, after in zip(original, updated, strict=True):
            made = list(self._replace_statement(before, after))
            if len(made) > 1 and isinstance(after, Import):
                made[-1] = made[-1].with_changes(semicolon=after.semicolon)
                made[:-1] = [
                    one.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for one in made[:-1]
                ]
            body += made
        return body

    def _replace_statement(
        self, before: cst.BaseSmallStatement, after: cst.BaseSmallStatement
    ) -> Iterator[cst.BaseSmallStatement]:
        found = self._found
        if isinstance(before, Import):
            rest = without(before, found.unused.get(before, ()))
            moves = found.moves.get(before, {}) if isinstance(before, cst.ImportFrom) else {}
            yield from split(rest, moves) if rest else ()
        else:
            yield after
        for module in sorted(found.added.get(before, ())):  # type: ignore[call-overload]
            yield alias_import(module, found.alias_of(module))


def _make_lines(
    body: Sequence[cst.BaseSmallStatement], line: cst.SimpleStatementLine, *, is_one: bool
) -> list[cst.SimpleStatementLine]:
    """Statements in place of a line: on one line as before, or each on a separate line."""
    if is_one or len(body) < 2:
        return [line.with_changes(body=body)] if body else []
    first, *others = body
    end = line.trailing_whitespace
    if end.comment is None or not _FOR_TOOLS.match(end.comment.value):
        end = end.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
    rest = [cst.SimpleStatementLine([one], trailing_whitespace=end) for one in others]
    return [line.with_changes(body=[first]), *rest]


def _count_lines(lines: Sequence[cst.SimpleStatementLine]) -> int:
    return sum(cst.Module([]).code_for_node(one).count("\n") for one in lines)
