"""What changes in one file's source: imports, uses through a module, and the texts of patches."""

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
from .imports import aliases_of, module_of
from .table import Home, Table

_PATCHING = ("patch", "setattr", "delattr")
_BY_TEXT = ("import_module", "__import__")
_DOTTED = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")
Import = cst.Import | cst.ImportFrom


@dataclass(frozen=True)
class Note:
    """Something that a person has to look at.

    Attributes:
        line: Its line, from 1.
        name: What it is about.
        text: What to do.
        is_left: Whether it was left because it could not be rewritten.
    """

    line: int
    name: str
    text: str
    is_left: bool = False


class Findings(cst.CSTVisitor):
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
        # Where each line of imports is.
        self.lines: dict[cst.SimpleStatementLine, int] = {}
        # Which imports give a name its meaning, and where the names that an import binds are used.
        self._providers: dict[cst.Name, list[Import]] = {}
        self._users: dict[Import, dict[str, list[cst.Name]]] = {}
        self._roots: set[cst.CSTNode] = set()
        self._statements: set[cst.CSTNode] = set()
        self._exported: set[str] = set()
        # Without a comment, so that a line of them may go.
        self._top_level: set[cst.CSTNode] = set()
        # Imports whose names are attributes of a class.
        self._attributes: set[cst.CSTNode] = set()
        # Uses of what an old module is known to have, and whether they can mean nothing else.
        self._candidates: list[tuple[cst.Attribute, Home, bool]] = []
        # Names that are bound where ScopeProvider does not look.
        self._bound: set[str] = set()
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
            if line.trailing_whitespace.comment is None
            and not any(one.comment for one in line.leading_lines)
            for statement in line.body
        }
        scopes: set[Any] = {*self.metadata[ScopeProvider].values()}
        for scope in scopes:
            for one in scope.assignments if scope else ():
                if isinstance(one, ImportAssignment) and isinstance(one.node, Import):
                    roots = [_root(use.node) for use in one.references]
                    self._users.setdefault(one.node, {})[one.name] = roots
                    if isinstance(scope, ClassScope):
                        self._attributes.add(one.node)
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
        if any(isinstance(one, Import) for one in node.body):
            self.lines[node] = self._line(node)
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
        if _root(node) not in self._providers:
            return True
        names = self._names(node)
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
        self._tell_replaced(node.target)

    def visit_Del(self, node: cst.Del) -> None:
        self._tell_replaced(node.target)

    def visit_Call(self, node: cst.Call) -> None:
        parts = (get_full_name_for_node(node.func) or "").split(".")
        target = next((one.value for one in node.args if _is_target(one)), None)
        first = node.args[0].value if node.args else None
        if {*parts[-2:]} & {*_PATCHING}:
            self._text(target or first, is_whole=parts[-1] != "multiple")
            self._member(node.args)
        elif parts[-1] in _BY_TEXT:
            self._text(first, is_whole=False)
        self._tell(node, node, is_statement=node in self._statements)

    def visit_Decorator(self, node: cst.Decorator) -> None:
        if not isinstance(node.decorator, cst.Call):
            self._tell(node, cst.Call(node.decorator), is_statement=False)

    def leave_Module(self, original_node: cst.Module) -> None:
        """Find the uses that move, and the imports that nothing needs any more."""
        for node, home, is_sure in self._candidates:
            root = _root(node)
            if is_sure and root.value not in self._bound:
                self._use(node, home, root)
            else:
                text = "its module is something else on another path; change it by hand"
                self._leave(node, home.name, text)
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

    def _use(self, node: cst.Attribute, home: Home, root: cst.Name) -> None:
        self.uses[node] = home
        self.packages.add(home.package)
        self._roots.add(root)
        for statement in self._providers[root]:
            self.added.setdefault(statement, set()).add(home.module)

    def _bind(self, node: cst.BaseExpression | None) -> None:
        if isinstance(node, cst.Name):
            self._bound.add(node.value)

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
            home = self.table.find(name.name.removesuffix(".configure"))
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
        is_public = name in self._exported or statement in self._attributes
        if isinstance(statement, cst.ImportFrom) and alias.asname is not None:
            is_public |= name == alias.evaluated_name  # ``import x as x`` re-exports it
        return rewritten and not is_public

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
            self._note_replaced(value, moved)
        elif moved is not None:
            self._leave(value, text, f"write {moved}")

    def _member(self, arguments: Sequence[cst.Arg]) -> None:
        """Tell of a name that is replaced in an old module: ``patch.object(utils, "divide")``."""
        if len(arguments) < 2 or not isinstance(arguments[0].value, cst.Name | cst.Attribute):
            return
        module, text = arguments[0].value, _text_of(arguments[1].value)
        for path in self._names(module):
            home = self.table.find(f"{path.name}.{text}")
            if home is not None:
                told = f"Megatron's is replaced by this; give it {home.module}"
                self._leave(module, home.name, told)

    def _tell_replaced(self, target: cst.BaseExpression) -> None:
        for path in self._names(target) if isinstance(target, cst.Attribute) else ():
            home = self.table.find(path.name)
            if home is not None and path.source is QualifiedNameSource.IMPORT:
                self._note_replaced(target, f"{home.module}.{home.name}")

    def _note_replaced(self, node: cst.CSTNode, moved: str) -> None:
        told = f"what Megatron itself calls is no longer replaced by this, only {moved} is"
        self.notes.append(Note(self._line(node), moved.rpartition(".")[2], told))

    def _leave(self, node: cst.CSTNode, name: str, text: str) -> None:
        self.notes.append(Note(self._line(node), name, text, is_left=True))

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)


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
