"""The migration page: the old and the new module of each documented name."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_ROW = re.compile(
    r"^\| `(\w+)` \| `([^|]+)` \| `([\w.]+)` \| ([^|]*) \|(?: ([^|]*)\|)?", re.MULTILINE
)
_CHECK = re.compile(r"^\| (`[^|]+`) \| (?:(\d+) )?\| ([^|]*)\|$", re.MULTILINE)
# The page names the module in Megatron-LM. The package on the index has another name.
_ALSO = {"megatron.core.distributed.fsdp.src.megatron_fsdp": "megatron_fsdp"}


@dataclass(frozen=True)
class Home:
    """The new place of a name.

    Attributes:
        name: The name.
        module: The module that it is imported from, such as ``mcore.tensor``.
        releases: The releases of Megatron that have the name with the same arguments.
        absent_group: The meaning of a call without a group, in words. Often empty.
        positional: The number of positional arguments if the others are keyword-only.
        difference: The difference of every call, in words. Often empty.
    """

    name: str
    module: str
    releases: str
    absent_group: str
    positional: int | None = None
    difference: str = ""

    @property
    def package(self) -> str:
        """The name of the package for pip: ``mcore-tensor`` for ``mcore.tensor``."""
        return "-".join(self.module.split(".")[:2])


class Table:
    """The names of the page by their old paths, such as ``megatron.core.utils.divide``."""

    def __init__(self, page: str) -> None:
        self.homes: dict[str, Home] = {}
        # Names that stay with Megatron although a package has them.
        self.held: frozenset[str] = frozenset()
        checks = {
            name: (int(positional) if positional else None, difference.strip())
            for names, positional, difference in _CHECK.findall(page)
            for name in re.findall(r"\w+", names)
        }
        for name, modules, new, releases, absent_group in _ROW.findall(page):
            home = Home(name, new, releases, absent_group.strip(), *checks.get(name, ()))
            for old in modules.split("`, `"):
                self.homes.setdefault(f"{old}.{name}", home)
        for path, home in list(self.homes.items()):
            for prefix, other in _ALSO.items():
                if path.startswith(f"{prefix}."):
                    self.homes[other + path.removeprefix(prefix)] = home
        self.modules = frozenset(path.rpartition(".")[0] for path in self.homes)
        self.tails = {".".join(path.rsplit(".", 2)[1:]) for path in self.homes}
        self.roots = {one.partition(".")[0] for one in self.modules}
        self.packages = {
            ".".join(parts[:length])
            for parts in (one.split(".") for one in self.modules)
            for length in range(1, len(parts) + 1)
        }
        # Modules that only re-export a name: their other names are not of interest.
        self.fronts = {one.rpartition(".")[0] for one in self.modules} & self.modules
        self.hint = self._make_hint()

    def _make_hint(self) -> re.Pattern[bytes]:
        """Matches every source that imports from an old module, and a few others."""
        modules, fronts = _join(self.modules - self.fronts), _join(self.fronts)
        above = _join(one.rpartition(".")[0] for one in self.packages if "." in one)
        below = _join(one.rpartition(".")[2] for one in self.packages)
        names = _join(home.name for home in self.homes.values())
        return re.compile(
            rf"\b(?:{modules})\b|\b(?:{fronts})\s+import\b|\bimport\s+(?:{above})\s+as\b|"
            rf"\bfrom\s+(?:{above})\s+import\b[^=:]*?\b(?:{below})\b|"
            rf"\bfrom\s*\.[\w.]*\s+import\b[^=:]*?\b(?:{names}|{below})\b".encode()
        )

    def find(self, path: str) -> Home | None:
        """The new place of a dotted path, or None if it stays."""
        home = self.homes.get(path)
        return None if home is None or home.name in self.held else home

    def hold(self, names: Collection[str]) -> Table:
        """The same table, with names that stay with Megatron."""
        table = copy.copy(self)
        table.held = frozenset(names)
        return table

    def without_home(self, paths: Iterable[str]) -> set[str]:
        """The paths that belong to an old module and to no package."""
        return {
            one
            for one in paths
            if one.rpartition(".")[0] in self.modules - self.fronts
            and one not in self.homes
            and one not in self.packages
        }

    def find_start(self, path: str) -> str:
        """The old path at the start of a longer one, or of a text. Empty if there is none."""
        parts = path.split(".") if path.partition(".")[0] in self.roots else []
        starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((start for start in starts if start in self.homes), "")

    def moved(self, path: str) -> tuple[Home | None, str]:
        """The home of a path to a name or to an attribute of it, and the path's new form."""
        start = self.find_start(path)
        home = self.find(start)
        return home, f"{home.module}.{home.name}{path[len(start) :]}" if home else path


def _join(words: Iterable[str]) -> str:
    return "|".join(sorted({re.escape(word) for word in words}, key=len, reverse=True))


def read_table() -> Table:
    """The table of the page. In an installation the page is in this folder."""
    beside = Path(__file__).with_name("migration.md")
    page = beside if beside.exists() else beside.parents[2] / "docs/migration.md"
    return Table(page.read_text(encoding="utf-8"))
