"""The packages of the repository and the tested versions, read from their files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
PACKAGES_FOLDER = "packages"
TEST_TOOLS = ("rank_testing", "standin")
_PIN = re.compile(r"torch==\{matrix:torch:([^}]+)\}")
VERSION_LINE = re.compile(r"""^(__version__ *= *["'])([^"']*)""", re.MULTILINE)


class WorkspaceError(ValueError):
    """The packages folder does not describe a set of distributions."""


@dataclass(frozen=True)
class Distribution:
    """One package as its files describe it.

    Attributes:
        name: Canonical name, such as ``mcore-tensor``.
        module: Importable name, such as ``mcore.tensor``.
        folder: Absolute path of its folder.
        version_file: Absolute path of the file with its version.
        version: The version in that file.
        requires_python: Versions of Python that it supports.
        dependencies: Requirements of an installation without extras.
        extras: Additional requirements of each extra.
        test_dependencies: Additional requirements of its tests (dependency group ``test``).
        lowest_constraints: Limits for indirect requirements at the lowest versions of the direct
            requirements, which do not work with newer ones (dependency group ``lowest``).
        siblings: Names of the required packages of this repository, sorted.
    """

    name: str
    module: str
    folder: Path
    version_file: Path
    version: Version
    requires_python: SpecifierSet
    dependencies: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]
    test_dependencies: tuple[Requirement, ...]
    lowest_constraints: tuple[Requirement, ...]
    siblings: tuple[str, ...]

    @property
    def source(self) -> Path:
        """The folder from which the module is imported."""
        return self.folder / "src"

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The dependencies and then those of every extra."""
        return (*self.dependencies, *(one for extra in self.extras.values() for one in extra))


@dataclass(frozen=True)
class Workspace:
    """All packages of a repository, each after the packages that it needs."""

    root: Path
    distributions: Mapping[str, Distribution]

    def __getitem__(self, name: str) -> Distribution:
        """The package of that name."""
        try:
            return self.distributions[canonicalize_name(name)]
        except KeyError:
            known = ", ".join(self.distributions)
            raise WorkspaceError(f"{name!r} is not a package here. Packages: {known}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, siblings before the packages that need them."""
        return tuple(self.distributions)

    def choose(self, names: Iterable[str]) -> tuple[str, ...]:
        """The named packages, all by default, siblings first."""
        return self.order([self[name].name for name in names] or self.names)

    def closure(self, name: str) -> tuple[str, ...]:
        """The siblings that an installation brings, direct or indirect."""
        direct = self[name].siblings
        return self.order({*direct, *(one for each in direct for one in self.closure(each))})

    def direct_dependants(self, name: str) -> tuple[str, ...]:
        """The packages that require a package directly."""
        wanted = self[name].name
        return tuple(one.name for one in self.distributions.values() if wanted in one.siblings)

    def dependants(self, names: Iterable[str]) -> tuple[str, ...]:
        """The packages that need one of the named, without the named packages."""
        given = {self[name].name for name in names}
        return tuple(
            name for name in self.names if name not in given and given & {*self.closure(name)}
        )

    def order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Sort names: siblings before the packages that need them."""
        wanted = set(names)
        return tuple(name for name in self.distributions if name in wanted)


def load_workspace(root: Path) -> Workspace:
    """Read every package of a repository."""
    root = root.resolve()
    files = sorted((root / PACKAGES_FOLDER).glob("*/pyproject.toml"))
    if not files:
        raise WorkspaceError(f"no packages/*/pyproject.toml in {root}: give the repository's root")
    tables = [(file, read_toml(file)) for file in files]
    names = {
        canonicalize_name(_read_text(file, table, "project", "name")) for file, table in tables
    }
    found = {one.name: one for one in (_read_package(*each, names) for each in tables)}
    try:
        order = list(
            TopologicalSorter({one.name: one.siblings for one in found.values()}).static_order()
        )
    except CycleError as error:
        raise WorkspaceError(
            f"these packages need each other: {', '.join(error.args[1])}"
        ) from None
    return Workspace(root, {name: found[name] for name in order})


def _read_package(file: Path, table: Mapping[str, Any], names: Iterable[str]) -> Distribution:
    project = table["project"]
    version_file = file.parent / _read_text(file, table, "tool", "hatch", "version", "path")
    dependencies = _parse(project.get("dependencies", ()))
    extras = project.get("optional-dependencies", {})
    groups = table.get("dependency-groups", {})
    required = {canonicalize_name(one.name) for one in dependencies}
    return Distribution(
        name=canonicalize_name(project["name"]),
        module=".".join(version_file.parent.relative_to(file.parent / "src").parts),
        folder=file.parent, version_file=version_file, version=Version(read_version(version_file)),
        requires_python=SpecifierSet(_read_text(file, table, "project", "requires-python")),
        dependencies=dependencies, extras={name: _parse(texts) for name, texts in extras.items()},
        test_dependencies=_parse(groups.get("test", ())),
        lowest_constraints=_parse(groups.get("lowest", ())),
        siblings=tuple(sorted(required.intersection(names))),
    )  # fmt: skip


def read_version(file: Path) -> str:
    """The string that a file assigns to ``__version__``, without running the file."""
    if not file.is_file():
        raise WorkspaceError(f"{file} does not exist: it has to contain __version__")
    found = VERSION_LINE.findall(file.read_text(encoding="utf-8"))
    if len(found) != 1:
        raise WorkspaceError(f'{file} has {len(found)} lines such as __version__ = "0.1.0", not 1')
    return str(found[0][1])


def _parse(texts: Iterable[str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(text) for text in texts)


def _read_text(file: Path, table: Mapping[str, Any], *keys: str) -> str:
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, str):
        raise WorkspaceError(f"{file} has no text under {'.'.join(keys)}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


class Cell(NamedTuple):
    """One combination that the packages are tested on."""

    python: str
    torch: str


def read_torch_pin(root: Path) -> str:
    """The version of torch in the default environment, such as ``2.13.0``."""
    default = read_toml(root / "hatch.toml")["envs"]["default"]["dependencies"]
    pins = [found[1] for text in default if (found := _PIN.fullmatch(text))]
    if len(pins) != 1:
        raise ValueError(
            f"{root / 'hatch.toml'}: the default environment has {len(pins)} dependencies of the "
            "form torch=={matrix:torch:X}; write exactly one"
        )
    return str(pins[0])


def list_dev_dependencies(root: Path) -> list[str]:
    """The dependencies of the environment ``dev``, with torch at its pin."""
    pinned = f"torch=={read_torch_pin(root)}"
    environments = read_toml(root / "hatch.toml")["envs"]
    more = environments["dev"]["extra-dependencies"]
    return [_PIN.sub(pinned, text) for text in (*environments["default"]["dependencies"], *more)]


def read_cells(root: Path) -> list[Cell]:
    """The cells of the environment ``matrix``: the products of its tables, oldest first."""
    tables = read_toml(root / "hatch.toml")["envs"]["matrix"]["matrix"]
    cells = {Cell(*pair) for one in tables for pair in product(one["python"], one["torch"])}
    return sorted(cells, key=lambda cell: [*map(Version, cell)])
