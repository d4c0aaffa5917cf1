"""The changes of one file's source: imports, uses through a module, and the strings of patches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    ClassScope,
    ImportAssignment,
    PositionProvider,
    QualifiedName,
    QualifiedNameSource,
    ScopeProvider,
)

from .differences import differences
from .imports import Import, absolute, aliases_of, has_comments, module_of
from .table import Home, Table

_PATCHING = ("patch", "setattr", "delattr")
_BY_TEXT = ("import_module", "__import__")
_DOTTED = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Note:
    """A place that a person has to check.

    Attributes:
        line: Its line, from 1.
        name: The name concerned.
        text: The advice.
        is_left: Whether it could not be rewritten and stays as it is.
    """

    line: int
    name: str
    text: str
    is_left: bool = False


class Findings(cst.CSTVisitor):
    """The changes of a file, by the identity of its nodes."""

    METADATA_DEPENDENCIES = (PositionProvider, ScopeProvider)

    def __init__(self, table: Table, package: str = "") -> None:
        super().__init__()
        self.table = table
        self.package = package
        self.moved: set[Home] = set()
        self.notes: list[Note] = []
        self.stays: set[str] = set()
        # From-imports that stay because of their comments.
        self._left: set[Import] = set()
        # Names of a from-import that move, uses through a module, strings, imports to add or drop.
        self.moves: dict[cst.ImportFrom, dict[str, str]] = {}
        self.uses: dict[cst.Attribute, Home] = {}
        self.texts: dict[cst.SimpleString, str] = {}
        self.added: dict[Import, set[str]] = {}
        self.unused: dict[Import, list[cst.ImportAlias]] = {}
        # The number of each line of imports.
        self.lines: dict[cst.SimpleStatementLine, int] = {}
        # The imports that may bind a name, and the uses of the names that an import binds.
        self._providers: dict[cst.Name, list[Import]] = {}
        self._users: dict[Import, dict[str, list[cst.Name]]] = {}
        self._roots: set[cst.CSTNode] = set()
        self._statements: set[cst.CSTNode] = set()
        self._exported: set[str] = set()
        # Statements without a comment: a line of them may be deleted.
        self._top_level: set[cst.CSTNode] = set()
        # Imports whose names are attributes of a class.
        self._attributes: set[cst.CSTNode] = set()
        # Uses of known names of old modules, and whether they can mean nothing else.
        self._candidates: list[tuple[cst.Attribute, Home, bool]] = []
        # Names bound in places that ScopeProvider does not read.
        self._bound: set[str] = set()
        self._taken: set[str] = set()

    @property
    def changes(self) -> bool:
        """Whether there is anything to rewrite."""
        return bool(self.moves or self.uses or self.texts)

    def alias_of(self, module: str) -> str:
        """The name under which the file imports a module as a whole."""
        alias = module.replace(".", "_")
        while alias in self._taken:
            alias += "_"
        return alias

    # Visiting the source

    def visit_Module(self, node: cst.Module) -> None:
        lines = [one for one in node.body if isinstance(one, cst.SimpleStatementLine)]
        self._top_level = {
            statement
            for line in lines
            if line.trailing_whitespace.comment is None
            and not any(one.comment for one in line.leading_lines)
            for statement in line.body
        }
        scopes: set[Any] = {*self.metadata[ScopeProvider].values()}
        for scope in scopes:
            for one in scope.assignments if scope else ():
                if isinstance(one, ImportAssignment) and isinstance(one.node, Import):
                    roots = [_find_root(use.node) for use in one.references]
                    self._users.setdefault(one.node, {})[one.name] = roots
                    if isinstance(scope, ClassScope):
                        self._attributes.add(one.node)
                    for root in roots:
                        self._providers.setdefault(root, []).append(one.node)

    def visit_Name(self, node: cst.Name) -> None:
        if not node.value.startswith("mcore_"):
            return
        names = self._list_names(node)
        modules = {one.name for one in names if one.source is QualifiedNameSource.IMPORT}
        if {one.replace(".", "_") for one in modules} != {node.value}:
            self._taken.add(node.value)

    def visit_Expr(self, node: cst.Expr) -> None:
        self._statements.add(node.value)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        if any(isinstance(one, Import) for one in node.body):
            self.lines[node] = self._find_line(node)
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
                for name in self._list_names(node, path):
                    home = self.table.find(name.name)
                    if home is not None and "." in path:
                        advice = f"it is in a string: write {home.module}.{home.name}"
                        self._leave(text, home.name, advice)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = module_of(node, self.package)
        if module is None:
            return
        if isinstance(node.names, cst.ImportStar):
            if module in self.table.modules:
                self._leave(node, f"{module}.*", "name the imports, then run this once more")
            return
        names = [str(one.evaluated_name) for one in node.names]
        homes = {name: home for name in names if (home := self.table.find(f"{module}.{name}"))}
        moved = {name: home.module for name, home in homes.items()}
        if moved and has_comments(node) and len({*map(moved.get, names)}) > 1:
            self._left.add(node)
            self._leave(node, ", ".join(moved), "comments are among the names: move them yourself")
        elif moved:
            self.moves[node] = moved
            self.moved.update(homes.values())

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if _find_root(node) not in self._providers:
            return True
        names = self._list_names(node)
        paths = {one.name for one in names if one.source is QualifiedNameSource.IMPORT}
        homes = [home for home in map(self.table.find, paths) if home is not None]
        if not homes:
            self.stays |= self.table.without_home(paths)
            return True
        self._candidates.append((node, homes[0], len(homes) == len(names)))
        return False

    def visit_MatchAs(self, node: cst.MatchAs) -> None:
        self._bind(node.name)

    def visit_MatchStar(self, node: cst.MatchStar) -> None:
        self._bind(node.name)

    def visit_MatchMapping(self, node: cst.MatchMapping) -> None:
        self._bind(node.rest)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._bind(node.target)

    def visit_NameItem(self, node: cst.NameItem) -> None:
        self._bind(node.name)  # of a ``global``: a function may import it

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._visit_replaced(node.target)

    def visit_Del(self, node: cst.Del) -> None:
        self._visit_replaced(node.target)

    def visit_Call(self, node: cst.Call) -> None:
        parts = (get_full_name_for_node(node.func) or "").split(".")
        keywords = {one.keyword.value: one.value for one in node.args if one.keyword is not None}
        target = keywords.get("target")
        first = node.args[0].value if node.args else None
        if {*parts[-2:]} & {*_PATCHING}:
            self._visit_text(target or first, is_whole=parts[-1] != "multiple")
            self._visit_member(node.args)
        elif parts[-1] in _BY_TEXT:
            self._visit_text(first, is_whole=False)
        self._note_differences(node, node, is_statement=node in self._statements)

    def visit_Decorator(self, node: cst.Decorator) -> None:
        if not isinstance(node.decorator, cst.Call):
            self._note_differences(node, cst.Call(node.decorator), is_statement=False)

    def leave_Module(self, original_node: cst.Module) -> None:
        """Find the uses that move, and the imports that nothing needs any longer."""
        for node, home, is_sure in self._candidates:
            root = _find_root(node)
            if is_sure and root.value not in self._bound:
                self.uses[node] = home
                self.moved.add(home)
                self._roots.add(root)
                for statement in self._providers[root]:
                    self.added.setdefault(statement, set()).add(home.module)
            else:
                text = "its module is something else on another path: change it yourself"
                self._leave(node, home.name, text)
        for statement in self.added:
            for alias in () if has_comments(statement) else aliases_of(statement):
                if self._is_unused(alias, statement):
                    self.unused.setdefault(statement, []).append(alias)
        there: set[str] = set()
        for statement in sorted(self.added, key=self._find_line):
            if statement in self._top_level:
                self.added[statement] -= there
                there |= self.added[statement]

    # Recording the changes

    def _bind(self, node: cst.BaseExpression | None) -> None:
        if isinstance(node, cst.Name):
            self._bound.add(node.value)

    def _list_names(self, node: cst.CSTNode, path: str = "") -> Sequence[QualifiedName]:
        """The possible meanings of a node, or of a dotted path in its place."""
        scope: Any = self.get_metadata(ScopeProvider, node, None)
        found = scope.get_qualified_names_for(path or node) if scope else ()
        return sorted(
            (
                QualifiedName(absolute(one.name, self.package) or one.name, one.source)
                for one in found
            ),
            key=lambda one: one.name,
        )

    def _note_differences(self, node: cst.CSTNode, call: cst.Call, *, is_statement: bool) -> None:
        """Note the differences of a call of a moved name."""
        if self._left.issuperset(self._providers.get(_find_root(call.func), ())):
            return
        for name in self._list_names(call.func):
            home = self.table.find(name.name.removesuffix(".configure"))
            if home is not None and name.source is QualifiedNameSource.IMPORT:
                found = differences(home, call, is_statement=is_statement)
                self.notes += [Note(self._find_line(node), home.name, text) for text in found]
                return

    def _is_unused(self, alias: cst.ImportAlias, statement: Import) -> bool:
        """Whether all uses of a name that an import binds were rewritten."""
        name = str(alias.evaluated_alias or alias.evaluated_name)
        users = self._users[statement].items()
        roots = [root for bound, of in users if f"{name}.".startswith(f"{bound}.") for root in of]
        rewritten = bool(roots) and all(root in self._roots for root in roots)
        is_public = name in self._exported or statement in self._attributes
        if isinstance(statement, cst.ImportFrom) and alias.asname is not None:
            is_public |= name == alias.evaluated_name  # ``import x as x`` re-exports it
        return rewritten and not is_public

    def _visit_text(self, value: cst.BaseExpression | None, *, is_whole: bool) -> None:
        """Move the path in a string, or note that it stays."""
        text = _read_text(value)
        if value is None or text is None:
            return
        home, moved = self.table.moved(text)
        if text in self.table.modules:
            self._leave(value, text, "name each part of it separately")
        elif home is not None and is_whole and isinstance(value, cst.SimpleString):
            self.texts[value] = moved
            self.moved.add(home)
            self._note_replaced(value, moved)
        elif home is not None:
            self._leave(value, text, f"write {moved}")

    def _visit_member(self, arguments: Sequence[cst.Arg]) -> None:
        """Note a patch of a name in an old module: ``patch.object(utils, "divide")``."""
        if len(arguments) < 2 or not isinstance(arguments[0].value, cst.Name | cst.Attribute):
            return
        module, text = arguments[0].value, _read_text(arguments[1].value)
        for path in self._list_names(module):
            home = self.table.find(f"{path.name}.{text}")
            if home is not None:
                advice = f"this patches Megatron's name: patch {home.module} instead"
                self._leave(module, home.name, advice)

    def _visit_replaced(self, target: cst.BaseExpression) -> None:
        for path in self._list_names(target) if isinstance(target, cst.Attribute) else ():
            home = self.table.find(path.name)
            if home is not None and path.source is QualifiedNameSource.IMPORT:
                self._note_replaced(target, f"{home.module}.{home.name}")

    def _note_replaced(self, node: cst.CSTNode, moved: str) -> None:
        text = f"this now replaces only {moved}, and no longer the name that Megatron calls"
        self.notes.append(Note(self._find_line(node), moved.rpartition(".")[2], text))

    def _leave(self, node: cst.CSTNode, name: str, text: str) -> None:
        self.notes.append(Note(self._find_line(node), name, text, is_left=True))

    def _find_line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)


def _find_root(node: cst.CSTNode) -> cst.Name:
    """The first name of a dotted expression."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node  # type: ignore[return-value]


def _read_text(value: cst.BaseExpression | None) -> str | None:
    """The value of a string as far as the source shows it."""
    if isinstance(value, cst.SimpleString | cst.ConcatenatedString):
        text = value.evaluated_value
        return text if isinstance(text, str) else None
    first = value.parts[0] if isinstance(value, cst.FormattedString) and value.parts else None
    return first.value if isinstance(first, cst.FormattedStringText) else None
