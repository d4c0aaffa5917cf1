"""One file's source, rewritten: imports, uses through a module, and the texts of patches."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    ImportAssignment,
    MetadataWrapper,
    PositionProvider,
    QualifiedName,
    QualifiedNameSource,
    ScopeProvider,
)

from .differences import differences
from .imports import alias_import, aliases_of, module_of, split, without, without_names
from .table import Home, Table

_PATCHING = ("patch", "setattr", "delattr")
_BY_TEXT = ("import_module", "__import__")
_DOTTED = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")
_NEWLINES = b"\r\n"
# Comments that hold for each statement that an import becomes.
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pylint:|pyright:|ruff:|pragma:|fmt: *skip|isort: *skip)")
Import = cst.Import | cst.ImportFrom


class LayoutError(ValueError):
    """A source that can't be kept byte for byte."""


@dataclass(frozen=True)
class Note:
    """Something that a person has to look at.

    Attributes:
        line: Its line before the rewriting, from 1.
        name: What it is about.
        text: What to do.
        is_left: Whether it was left because it could not be rewritten.
    """

    line: int
    name: str
    text: str
    is_left: bool = False


@dataclass
class Rewritten:
    """A file after the rewriting.

    Attributes:
        source: Its bytes.
        packages: The packages that it now needs.
        notes: What to look at, by line.
        stays: What it goes on taking from the old modules, since no package has it.
    """

    source: bytes
    packages: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
    stays: set[str] = field(default_factory=set)


def rewrite(source: bytes, table: Table) -> Rewritten:
    """Rewrite the source of a file, and leave all else in it byte for byte.

    Raises:
        libcst.ParserSyntaxError: It is not Python.
        LayoutError: It can't be written back as it is.
    """
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    if _ended_like(source, wrapper.module.bytes) != source:
        raise LayoutError("it has blanks that would not be kept; rewrite it by hand")
    found = _Findings(table)
    wrapper.visit(found)
    notes = sorted(dict.fromkeys(found.notes), key=lambda one: one.line)
    if found.changes:
        source = _ended_like(source, wrapper.module.visit(_Rewriter(found)).bytes)
    return Rewritten(source, found.packages, notes, found.stays)


def _ended_like(source: bytes, text: bytes) -> bytes:
    """A text with the byte order mark and the end of its source, which LibCST may drop."""
    begin = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    end = source[len(source.rstrip(_NEWLINES)) :]
    return begin + text.removeprefix(codecs.BOM_UTF8).rstrip(_NEWLINES) + end


class _Findings(cst.CSTVisitor):
    """What changes in a file, by the identity of its nodes."""

    METADATA_DEPENDENCIES = (PositionProvider, ScopeProvider)

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.packages: set[str] = set()
        self.notes: list[Note] = []
        self.stays: set[str] = set()
        # Names of a from-import that move, uses through a module, texts, imports to add or to drop.
        self.moves: dict[cst.ImportFrom, dict[str, str]] = {}
        self.uses: dict[cst.Attribute, Home] = {}
        self.texts: dict[cst.SimpleString, str] = {}
        self.added: dict[Import, set[str]] = {}
        self.unused: dict[Import, list[cst.ImportAlias]] = {}
        # Which imports give a name its meaning, and where the names that an import binds are used.
        self._providers: dict[cst.Name, list[Import]] = {}
        self._users: dict[Import, dict[str, list[cst.Name]]] = {}
        self._roots: set[cst.CSTNode] = set()
        self._statements: set[cst.CSTNode] = set()
        self._exported: set[str] = set()
        # Without a comment above, so that a line of them may go.
        self._top_level: set[cst.CSTNode] = set()
        self._taken: set[str] = set()

    @property
    def changes(self) -> bool:
        """Whether anything is to be rewritten."""
        return bool(self.moves or self.uses or self.texts)

    def alias_of(self, module: str) -> str:
        """The name under which the file imports a module that it uses as a whole."""
        alias = module.replace(".", "_")
        while alias in self._taken:
            alias += "_"
        return alias

    # What is there

    def visit_Module(self, node: cst.Module) -> None:
        lines = [one for one in node.body if isinstance(one, cst.SimpleStatementLine)]
        self._top_level = {
            statement
            for line in lines
            if not any(one.comment for one in line.leading_lines)
            for statement in line.body
        }
        scopes: set[Any] = {*self.metadata[ScopeProvider].values()}
        for scope in scopes:
            for one in scope.assignments if scope else ():
                if isinstance(one, ImportAssignment) and isinstance(one.node, Import):
                    roots = [_root(use.node) for use in one.references]
                    self._users.setdefault(one.node, {})[one.name] = roots
                    for root in roots:
                        self._providers.setdefault(root, []).append(one.node)

    def visit_Name(self, node: cst.Name) -> None:
        if not node.value.startswith("mcore_"):
            return
        names = self._names(node)
        modules = {one.name for one in names if one.source is QualifiedNameSource.IMPORT}
        if {one.replace(".", "_") for one in modules} != {node.value}:
            self._taken.add(node.value)

    def visit_Expr(self, node: cst.Expr) -> None:
        self._statements.add(node.value)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._exported |= {
            text.evaluated_value
            for one in node.body
            if isinstance(one, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.Expr)
            and matchers.findall(one, matchers.Name("__all__"))
            for text in matchers.findall(one, matchers.SimpleString())
            if isinstance(text, cst.SimpleString) and isinstance(text.evaluated_value, str)
        }

    def visit_Annotation(self, node: cst.Annotation) -> None:
        for text in matchers.findall(node, matchers.SimpleString()):
            value = cst.ensure_type(text, cst.SimpleString).evaluated_value
            for path in _DOTTED.findall(value) if isinstance(value, str) else ():
                for name in self._names(node, path):
                    home = self.table.find(name.name)
                    if home is not None and "." in path:
                        told = f"it is in a text; write {home.module}.{home.name}"
                        self._leave(text, home.name, told)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = module_of(node)
        if module is None:
            return
        if isinstance(node.names, cst.ImportStar):
            if module in self.table.modules:
                self._leave(node, f"{module}.*", "name what is imported, and run this again")
            return
        homes = {str(one.evaluated_name): self._home(module, one) for one in node.names}
        self.stays |= self.table.without_home(f"{module}.{name}" for name in homes)
        moved = {name: home.module for name, home in homes.items() if home is not None}
        if moved:
            self.moves[node] = moved
            self.packages |= {home.package for home in homes.values() if home is not None}

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        root = _root(node)
        providers = self._providers.get(root)
        if providers is None:
            return True
        names = self._names(node)
        paths = {one.name for one in names if one.source is QualifiedNameSource.IMPORT}
        homes = [home for home in map(self.table.find, paths) if home is not None]
        if not homes:
            self.stays |= self.table.without_home(paths)
            return True
        home = homes[0]
        if len(homes) != len(names):
            text = "its module is something else on another path; change it by hand"
            self._leave(node, home.name, text)
            return False
        self.uses[node] = home
        self.packages.add(home.package)
        self._roots.add(root)
        for statement in providers:
            self.added.setdefault(statement, set()).add(home.module)
        return False

    def visit_Call(self, node: cst.Call) -> None:
        parts = (get_full_name_for_node(node.func) or "").split(".")
        target = next((one.value for one in node.args if _is_target(one)), None)
        first = node.args[0].value if node.args else None
        if {*parts[-2:]} & {*_PATCHING}:
            self._text(target or first, is_whole=parts[-1] != "multiple")
        elif parts[-1] in _BY_TEXT:
            self._text(first, is_whole=False)
        self._tell(node, node, is_statement=node in self._statements)

    def visit_Decorator(self, node: cst.Decorator) -> None:
        if not isinstance(node.decorator, cst.Call):
            self._tell(node, cst.Call(node.decorator), is_statement=False)

    def leave_Module(self, original_node: cst.Module) -> None:
        """Find the imports that nothing needs any more, once all uses are known."""
        for statement in self.added:
            for alias in aliases_of(statement):
                if self._is_unused(alias, statement):
                    self.unused.setdefault(statement, []).append(alias)
        there: set[str] = set()
        for statement in sorted(self.added, key=self._line):
            if statement in self._top_level:
                self.added[statement] -= there
                there |= self.added[statement]

    # How it is found

    def _home(self, module: str, alias: cst.ImportAlias) -> Home | None:
        return self.table.find(f"{module}.{alias.evaluated_name}")

    def _names(self, node: cst.CSTNode, path: str = "") -> Sequence[QualifiedName]:
        """What a node, or a dotted path in its place, may mean."""
        scope: Any = self.get_metadata(ScopeProvider, node, None)
        found = scope.get_qualified_names_for(path or node) if scope else ()
        return sorted(found, key=lambda one: one.name)

    def _tell(self, node: cst.CSTNode, call: cst.Call, *, is_statement: bool) -> None:
        """Note what a call of a moved name does otherwise than before."""
        if _root(call.func) not in self._providers:
            return
        for name in self._names(call.func):
            home = self.table.find(name.name)
            if home is not None and name.source is QualifiedNameSource.IMPORT:
                told = differences(home, call, is_statement=is_statement)
                self.notes += [Note(self._line(node), home.name, text) for text in told]
                return

    def _is_unused(self, alias: cst.ImportAlias, statement: Import) -> bool:
        """Whether only what was rewritten uses a name that an import binds."""
        name = str(alias.evaluated_alias or alias.evaluated_name)
        users = self._users[statement].items()
        roots = [root for bound, of in users if f"{name}.".startswith(f"{bound}.") for root in of]
        rewritten = bool(roots) and all(root in self._roots for root in roots)
        return rewritten and name not in self._exported

    def _text(self, value: cst.BaseExpression | None, *, is_whole: bool) -> None:
        """Move the path that a text names, or tell that it is left."""
        text = _text_of(value)
        if value is None or text is None:
            return
        moved = self.table.moved(text)
        if text in self.table.modules:
            self._leave(value, text, "name what is used of it one by one")
        elif moved is not None and is_whole and isinstance(value, cst.SimpleString):
            self.texts[value] = moved
            self.packages.add("-".join(moved.split(".")[:2]))
            told = f"what Megatron itself calls is no longer replaced by this, only {moved} is"
            self.notes.append(Note(self._line(value), moved.rpartition(".")[2], told))
        elif moved is not None:
            self._leave(value, text, f"write {moved}")

    def _leave(self, node: cst.CSTNode, name: str, text: str) -> None:
        self.notes.append(Note(self._line(node), name, text, is_left=True))

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)


class _Rewriter(cst.CSTTransformer):
    """The changes of :class:`_Findings`, made."""

    def __init__(self, found: _Findings) -> None:
        super().__init__()
        self._found = found

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
        body = self._rewritten(original_node.body, updated_node.body)
        if not body:
            return cst.RemoveFromParent()
        if len(original_node.body) > 1 or len(body) == 1:
            return updated_node.with_changes(body=body)
        first, *others = body
        end = updated_node.trailing_whitespace
        if end.comment is None or not _FOR_TOOLS.match(end.comment.value):
            end = end.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
        lines = [cst.SimpleStatementLine([one], trailing_whitespace=end) for one in others]
        return cst.FlattenSentinel([updated_node.with_changes(body=[first]), *lines])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        body = self._rewritten(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body)

    def _rewritten(
        self, original: Sequence[cst.BaseSmallStatement], updated: Sequence[cst.BaseSmallStatement]
    ) -> list[cst.BaseSmallStatement]:
        """The small statements of a line, with the imports among them replaced."""
        body: list[cst.BaseSmallStatement] = []
        for before, after in zip(original, updated, strict=True):
            made = list(self._replaced(before, after))
            if len(made) > 1 and isinstance(after, Import):
                made[-1] = made[-1].with_changes(semicolon=after.semicolon)
                made[:-1] = [
                    one.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for one in made[:-1]
                ]
            body += made
        return body

    def _replaced(
        self, before: cst.BaseSmallStatement, after: cst.BaseSmallStatement
    ) -> Iterator[cst.BaseSmallStatement]:
        found = self._found
        kept: list[cst.BaseSmallStatement] = [after]
        if isinstance(before, cst.ImportFrom):
            unused = found.unused.get(before, [])
            rest = without_names(before, unused) if unused else before
            kept = [] if rest is None else [*split(rest, found.moves.get(before, {}))]
        elif isinstance(before, cst.Import) and before in found.unused:
            left = without(before, found.unused[before])
            kept = [] if left is None else [left]
        yield from kept
        for module in sorted(found.added.get(before, ())):  # type: ignore[call-overload]
            yield alias_import(module, found.alias_of(module))


def _root(node: cst.CSTNode) -> cst.Name:
    """The name that a dotted expression begins with."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node  # type: ignore[return-value]


def _is_target(argument: cst.Arg) -> bool:
    return argument.keyword is not None and argument.keyword.value == "target"


def _text_of(value: cst.BaseExpression | None) -> str | None:
    """A text as far as it is known before it runs."""
    if isinstance(value, cst.SimpleString | cst.ConcatenatedString):
        text = value.evaluated_value
        return text if isinstance(text, str) else None
    first = value.parts[0] if isinstance(value, cst.FormattedString) and value.parts else None
    return first.value if isinstance(first, cst.FormattedStringText) else None
