"""The migration page: the old and the new module of each documented name."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_PAGE = "migration.md"
_ROW = re.compile(r"^\| `(\w+)` \| `([^|]+)` \| `([\w.]+)` \|(?: ([^|]*)\|)?", re.MULTILINE)
# The page names the module in Megatron-LM. The package on the index has another name.
_ALSO = {"megatron.core.distributed.fsdp.src.megatron_fsdp": "megatron_fsdp"}


@dataclass(frozen=True)
class Home:
    """The new place of a name.

    Attributes:
        name: The name.
        module: The module that it is imported from, such as ``mcore.tensor``.
        absent_group: The meaning of a call without a group, in words. Often empty.
    """

    name: str
    module: str
    absent_group: str

    @property
    def package(self) -> str:
        """The name of the package for pip: ``mcore-tensor`` for ``mcore.tensor``."""
        return "-".join(self.module.split(".")[:2])


class Table:
    """The names of the page by their old paths, such as ``megatron.core.utils.divide``."""

    def __init__(self, page: str) -> None:
        self.homes: dict[str, Home] = {}
        for name, modules, new, absent_group in _ROW.findall(page):
            home = Home(name, new, absent_group.strip())
            for old in modules.split("`, `"):
                self.homes.setdefault(f"{old}.{name}", home)
        for path, home in list(self.homes.items()):
            for prefix, other in _ALSO.items():
                if path.startswith(f"{prefix}."):
                    self.homes[other + path.removeprefix(prefix)] = home
        self.modules = frozenset(path.rpartition(".")[0] for path in self.homes)
        self._roots = {one.partition(".")[0] for one in self.modules}
        self._packages = {
            ".".join(parts[:length])
            for parts in (one.split(".") for one in self.modules)
            for length in range(1, len(parts) + 1)
        }

    def may_concern(self, source: bytes) -> bool:
        """Whether a source names an old module, or cannot be parsed."""
        if not any(root.encode() in source for root in self._roots):
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return b"import" in source
        return any(map(self._is_about, ast.walk(tree)))

    def _is_about(self, node: ast.AST) -> bool:
        """Whether a node imports an old module or from it, or is a string that names it."""
        if isinstance(node, ast.Import):
            return any(one.name.partition(".")[0] in self._roots for one in node.names)
        if isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{one.name}" for one in node.names]
            is_old = node.module in self.modules or not self._packages.isdisjoint(paths)
            return is_old and not node.level
        text = node.value if isinstance(node, ast.Constant) else None
        return isinstance(text, str) and text.startswith(tuple(self.modules))

    def find(self, path: str) -> Home | None:
        """The new place of a dotted path, or None if it stays."""
        return self.homes.get(path)

    def without_home(self, paths: Iterable[str]) -> set[str]:
        """The paths that belong to an old module and to no package."""
        return {
            one
            for one in paths
            if one.rpartition(".")[0] in self.modules
            and one not in self.homes
            and one not in self._packages
        }

    def moved(self, path: str) -> str | None:
        """The new form of a path to a name or to an attribute of it, or None if it stays."""
        for module in self.modules:
            rest = path.removeprefix(f"{module}.")
            if rest != path:
                name, dot, inside = rest.partition(".")
                home = self.find(f"{module}.{name}")
                if home is not None:
                    return f"{home.module}.{name}{dot}{inside}"
        return None


def read_table() -> Table:
    """The table of the page. In an installation the page is in this folder."""
    beside = _HERE / _PAGE
    page = beside if beside.exists() else _HERE.parents[1] / "docs" / _PAGE
    return Table(page.read_text(encoding="utf-8"))
