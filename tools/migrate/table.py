"""Where each documented name was imported from and is imported from now: the migration page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_PAGE = "migration.md"
_ROW = re.compile(r"^\| `(\w+)` \| `([^|]+)` \| `([\w.]+)` \|(?: ([^|]*)\|)?", re.MULTILINE)
# What the page calls by its place in Megatron-LM is on the package index by another.
_ALSO = {"megatron.core.distributed.fsdp.src.megatron_fsdp": "megatron_fsdp"}


@dataclass(frozen=True)
class Home:
    """Where a name lives now.

    Attributes:
        name: The name.
        module: The module that it is imported from, such as ``mcore.tensor``.
        absent_group: What its call means where no group is given, in words; often empty.
    """

    name: str
    module: str
    absent_group: str

    @property
    def package(self) -> str:
        """What pip calls the package: ``mcore-tensor`` for ``mcore.tensor``."""
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

    def may_concern(self, source: str) -> bool:
        """Whether a source has the words of an old module and of a name from it, or ``*``."""
        words = set(re.findall(r"\w+", source))
        modules = {one for one in self.modules if words.issuperset(one.split("."))}
        if not modules:
            return False
        names = {name for module, _, name in map(_parted, self.homes) if module in modules}
        return not words.isdisjoint(names) or "import *" in source

    def find(self, path: str) -> Home | None:
        """The new home of what a dotted path names; None where it stays."""
        return self.homes.get(path)

    def moved(self, path: str) -> str | None:
        """The new spelling of a path to a name or to something inside of one; None if it stays."""
        for module in self.modules:
            rest = path.removeprefix(f"{module}.")
            if rest != path:
                name, dot, inside = rest.partition(".")
                home = self.find(f"{module}.{name}")
                if home is not None:
                    return f"{home.module}.{name}{dot}{inside}"
        return None


def _parted(path: str) -> tuple[str, str, str]:
    return path.rpartition(".")


def read_table() -> Table:
    """The table of the page, which lies beside this file once it is installed."""
    beside = _HERE / _PAGE
    page = beside if beside.exists() else _HERE.parent / "docs" / _PAGE
    return Table(page.read_text(encoding="utf-8"))
