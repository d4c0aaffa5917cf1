"""A quick look at a source: only files with something to rewrite or to note are read by LibCST."""

from __future__ import annotations

import ast
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from .imports import absolute
from .table import Table

_FROM = rb"\bfrom\s+%s\s+import\b[^=:]*?\b%s\b"
# Imports of Megatron's checkpoints and of its data parallelism, also within megatron.core.
_SAVES = re.compile(
    rb"\b(?:from|import)\s+(?:megatron\.core|\.+[\w.]*)\.?dist_checkpointing\b|"
    + _FROM % (rb"(?:megatron\.core|\.+)", rb"dist_checkpointing")
    + b"|"
    + _FROM % (rb"(?:megatron\.core|\.+[\w.]*)\.?distributed[\w.]*", rb"DistributedDataParallel")
)
_FOLDER = re.compile(r"/((?:megatron/(?:core|bridge)|megatron_fsdp)(?:/.*)?)$")


@dataclass
class Look:
    """The first impression of a source.

    Attributes:
        names: The names of the page that it imports or writes in a string.
        stays: Names that it imports from the old modules, and that no package has.
        has_module: Whether it uses an old module as a whole, or cannot be parsed.
        relative: Its relative imports of such names from a package that is not known.
        saves: Whether it imports Megatron's checkpoints or its data parallelism.
        converts: Whether it converts the entries of checkpoints.
    """

    names: set[str] = field(default_factory=set)
    stays: set[str] = field(default_factory=set)
    has_module: bool = False
    relative: int = 0
    saves: bool = False
    converts: bool = False

    def has_work(self, table: Table) -> bool:
        """Whether there may be something to rewrite or to note."""
        return self.has_module or not self.names <= table.held


def find_package(file: Path) -> str:
    """The package of a file below a folder of Megatron, such as ``megatron.core.models``."""
    match = _FOLDER.search(Path(os.path.abspath(file)).parent.as_posix())
    return match[1].replace("/", ".") if match else ""


def scan(source: bytes, table: Table, package: str) -> Look:
    """Look at a source in a package."""
    look = Look(
        saves=bool(_SAVES.search(source)), converts=b"to_megatron_sharded_state_dict" in source
    )
    if not table.hint.search(source):
        return look
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        look.has_module = True
        return look
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            look.has_module |= any(
                one.name in table.packages
                or (one.asname is None and one.name.partition(".")[0] in table.roots)
                for one in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            _scan_from(node, look, table, package)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            look.has_module |= node.value in table.modules
            if start := table.find_start(node.value):
                look.names.add(table.homes[start].name)
    return look


def _scan_from(node: ast.ImportFrom, look: Look, table: Table, package: str) -> None:
    module = absolute("." * node.level + (node.module or ""), package)
    names = [one.name for one in node.names]
    if module is None:
        tail = (node.module or "").rpartition(".")[2]
        look.relative += any(f"{tail}.{name}" in table.tails for name in names)
        return
    paths = {f"{module}.{name}" for name in names}
    look.names |= {table.homes[path].name for path in paths & table.homes.keys()}
    is_star = module in table.modules and "*" in names
    look.has_module |= is_star or not table.packages.isdisjoint(paths)
    look.stays |= table.without_home(paths - {f"{module}.*"})
