"""Checks, without importing a package, whether it is installed and can work here."""

from __future__ import annotations

import ast
import csv
import json
import platform
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, parse_tag, sys_tags
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from mcore.versioning.lookup import read_version_text, recorded_version

_LIBRARIES = (
    ("torch", "torch"),
    ("transformer_engine", "transformer-engine"),
    ("flash_attn", "flash-attn"),
    ("mamba_ssm", "mamba-ssm"),
    ("causal_conv1d", "causal-conv1d"),
)
_OWN = ("versioning", "tensor", "parallel", "modules", "observe")
_MODULE_SUFFIXES = (".py", ".so", ".pyd")
_FILES_WITH_VERSION = ("__init__.py", "_version.py", "version.py", "__version__.py")


class PackageState(NamedTuple):
    """The state of one distribution, with a reason if it can't work here."""

    name: str
    version: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        """Return the version, ``not installed``, or ``present but unusable: <reason>``."""
        if self.reason is not None:
            return f"{self.status}: {self.reason}"
        return self.version or self.status

    @property
    def status(self) -> str:
        """``installed``, ``not installed`` or ``present but unusable``."""
        if self.reason is not None:
            return "present but unusable"
        return "not installed" if self.version is None else "installed"


def package_state(module: str, name: str, watched: Collection[str] | None = None) -> PackageState:
    """Determine whether a package is installed and can work here, without importing it.

    A problem is reported only if the installed files themselves prove it. Of its requirements only
    those in ``watched``, which are normalised names, are checked, all of them with None.
    """
    try:
        spec = _find_spec(module)
    except Exception as error:  # a finder of another package
        return PackageState(name, reason=f"looking for {module} raises {error!r}")
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        # A source tree on the path, or a module of another distribution.
        if spec is None:
            return PackageState(name)
        if bare_folder := _describe_bare_folder(module, spec):
            return PackageState(name, reason=bare_folder)
        version = _read_version_in_source(spec)
        place = f"{module} at {_get_location(spec)}"
        reason = f"{place} has no metadata and no readable version" if version is None else None
        return PackageState(name, version, reason)
    except Exception as error:  # an entry of sys.path that is no path
        return PackageState(name, reason=f"looking for its metadata raises {error!r}")
    try:
        version = _field(installed, "Version") or recorded_version(name)
    except ValueError:  # not UTF-8
        version = recorded_version(name)
    for reason in _find_problems(installed, version, module, spec, watched):
        return PackageState(name, reason=reason)
    return PackageState(name, version)


def _find_problems(
    installed: Distribution,
    version: str | None,
    module: str,
    spec: ModuleSpec | None,
    watched: Collection[str] | None,
) -> Iterator[str]:
    if version is None or read_version_text(version) is None:
        yield f"its metadata gives the version {version!r}, which is not a valid version"
    elif spec is None:
        yield f"version {version} is recorded as installed, but there is no module {module}"
    elif bare_folder := _describe_bare_folder(module, spec):
        yield bare_folder
    else:
        for problems in (
            _find_shadowing(installed, version, module, spec),
            _check_interpreter(installed, version),
            _check_requirements(installed, version, watched),
        ):
            with suppress(Exception):  # metadata that cannot be read proves nothing
                yield from problems


def _find_spec(module: str) -> ModuleSpec | None:
    """Return the spec that ``import`` would find, also if loaded. No parent is imported."""
    parent, _, _ = module.rpartition(".")
    path = None
    if parent:
        parent_spec = _find_spec(parent)
        if parent_spec is None or parent_spec.submodule_search_locations is None:
            return None
        path = list(parent_spec.submodule_search_locations)
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec and find_spec(module, path)
        if spec is not None:
            return spec
    return None


def _describe_bare_folder(module: str, spec: ModuleSpec) -> str | None:
    if spec.has_location or spec.submodule_search_locations is None:
        return None
    return f"{module} is only a folder without code: {_get_location(spec)}"


def _get_location(spec: ModuleSpec) -> str:
    return spec.origin or ", ".join(spec.submodule_search_locations or ())


def _find_shadowing(
    installed: Distribution, version: str, module: str, spec: ModuleSpec
) -> Iterator[str]:
    place = module.replace(".", "/")
    # Reading the record here saves an object for each of torch's 12,000 files, half a second.
    rows = list(filter(None, csv.reader((installed.read_text("RECORD") or "").splitlines())))
    names = [row[0] for row in rows] or [file.as_posix() for file in installed.files or ()]
    # An editable installation records none of the module's files, so nothing is compared.
    own_files = {
        Path(str(installed.locate_file(name))).resolve()
        for name in names
        if name.endswith(_MODULE_SUFFIXES)
        and re.sub(r"\.[^/]*$", "", name) in (place, f"{place}/__init__")
    }
    first = min(own_files, default=None)
    if first and spec.has_location and Path(_get_location(spec)).resolve() not in own_files:
        yield (
            f"{module} is found at {_get_location(spec)}, in front of the installed version "
            f"{version} at {first}"
        )


def _check_interpreter(installed: Distribution, version: str) -> Iterator[str]:
    """Compare the supported Python versions and, for a wheel, its platform tags."""
    lines = (installed.read_text("WHEEL") or "").splitlines()
    tags = [line.partition(":")[2].strip() for line in lines if line.startswith("Tag:")]
    required = _field(installed, "Requires-Python")
    running = ".".join(str(part) for part in sys.version_info[:3])
    try:
        excluded = required and not SpecifierSet(required).contains(running)
    except InvalidSpecifier:
        excluded = False  # the wheel's tags are checked nevertheless
    if excluded:
        yield f"version {version} needs Python {required}, but this is {running}"
    if tags and not any(parse_tag(tag) & _get_supported_tags() for tag in tags):
        yield f"version {version} was built for {', '.join(tags)}, which this Python can't load"


@lru_cache(maxsize=1)  # hundreds of tags: milliseconds for each package
def _get_supported_tags() -> frozenset[Tag]:
    return frozenset(sys_tags())


def _check_requirements(
    installed: Distribution, version: str, watched: Collection[str] | None
) -> Iterator[str]:
    for text in installed.requires or ():
        try:
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate()
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue
        is_watched = watched is None or canonicalize_name(requirement.name) in watched
        problem = _find_problem(requirement) if applies and is_watched else None
        if problem is not None:
            wanted = f"{requirement.name}{requirement.specifier}"
            yield f"version {version} needs {wanted}, {problem}"


def _find_problem(requirement: Requirement) -> str | None:
    try:
        text = _field(distribution(requirement.name), "Version") or ""
        found = Version(text)
    except PackageNotFoundError:
        return "which is not installed"
    except InvalidVersion:
        return None  # reported for that package itself
    # A pre-release build, as in vendor containers, also satisfies requirements on its release.
    candidates = (found, Version(found.base_version))
    if any(requirement.specifier.contains(v, prereleases=True) for v in candidates):
        return None
    return f"but {text} is installed"


def _field(installed: Distribution, name: str) -> str | None:
    return next(iter(installed.metadata.get_all(name) or ()), None)


def _read_version_in_source(spec: ModuleSpec) -> str | None:
    """Return a literal ``__version__`` from the module's file or the usual files next to it."""
    origin = Path(_get_location(spec))
    is_package = spec.submodule_search_locations is not None
    files = [origin.with_name(name) for name in _FILES_WITH_VERSION] if is_package else [origin]
    return next((version for file in files if (version := _read_literal_version(file))), None)


def _read_literal_version(file: Path) -> str | None:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        value = getattr(node, "value", None)
        if "__version__" in names and isinstance(value, ast.Constant):
            return read_version_text(value.value)
    return None


class EnvironmentReport(NamedTuple):
    """The facts about an installation that a bug report needs."""

    python: str
    platform: str
    packages: tuple[PackageState, ...]

    def as_text(self) -> str:
        """Return one aligned line for each item."""
        lines = [("Python", self.python), ("platform", self.platform)]
        lines += [(package.name, str(package)) for package in self.packages]
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)

    def as_json(self) -> str:
        """Return a JSON object. Every package has a name, a status, a version and a reason."""
        keys = ("name", "status", "version", "reason")
        packages = [{key: getattr(one, key) for key in keys} for one in self.packages]
        content = {"python": self.python, "platform": self.platform, "packages": packages}
        return json.dumps(content, indent=2)


def environment_report() -> EnvironmentReport:
    """Collect the report, without importing any of the packages.

    Only a library's requirements on packages in the report are checked.
    """
    watched = tuple(name for _, name in _LIBRARIES)
    states = [package_state(module, name, watched) for module, name in _LIBRARIES]
    states += [package_state(f"mcore.{part}", f"mcore-{part}") for part in _OWN]
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return EnvironmentReport(python, platform.platform(), tuple(states))
