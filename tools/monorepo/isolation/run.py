"""Install one package alone, or all together, check its contents and run tests there."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from monorepo.git_tags import ReleaseTag, export_tree, release_tags
from monorepo.isolation.venv import CleanVenv, IsolationError, build_wheels, make_venv
from monorepo.ranges import format_requirement, sibling_requirements
from monorepo.workspace import (
    TEST_TOOLS,
    Distribution,
    Workspace,
    list_dev_dependencies,
    load_workspace,
)

# Tests may have hidden files, such as the metadata of a checkpoint.
_IGNORED = shutil.ignore_patterns("src", "__pycache__", ".*_cache", ".hypothesis")
_INTEGRATION = "tests-integration"
TORCH = "torch"
_IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
name, distribution, *absent = sys.argv[1:]
package = importlib.import_module(name)
for module in pkgutil.walk_packages(package.__path__, name + "."):
    if not module.name.endswith(".__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if f'pip install "{distribution}[' not in str(error):  # the message names its extra
                raise
for other in absent:
    if importlib.util.find_spec(other) is not None:
        raise SystemExit(f"{other} can be imported, which {name} does not declare")
if not package.__file__.startswith(sys.prefix):
    raise SystemExit(f"{name} is imported from {package.__file__}, outside {sys.prefix}")
"""


@dataclass(frozen=True)
class IsolationRun:
    """The settings that all packages of one run share.

    Attributes:
        workspace: The repository.
        wheels: The wheel of each package and of each sibling that it needs.
        scratch: An empty folder outside the repository.
        python: The interpreter to test on.
        torch: The version of torch to install.
        lowest: Use the lowest version that each requirement but torch allows.
    """

    workspace: Workspace
    wheels: Mapping[str, Path]
    scratch: Path
    python: str
    torch: str
    lowest: bool = False

    def check(self, name: str) -> str:
        """Install one package alone, run its tests there and return a summary."""
        target = self.workspace[name]
        start_s = time.monotonic()
        folder = self.scratch / target.name
        venv = make_venv(folder / "venv", self.python, self.list_constraints(target))
        direct = list_direct_requirements(target)
        if self.lowest:
            venv = venv.pin_lowest(str(one) for one in direct if one.name != TORCH)
        venv.install(f"{target.name} @ {self.wheels[target.name].as_uri()}")
        check_contents(self.workspace, target, venv)
        # The tests' requirements must not raise the versions under test.
        venv.install(*map(str, target.test_dependencies), *pin_installed(venv, direct))
        # Once more: a requirement of the tests could bring a sibling.
        check_siblings(self.workspace, target, venv.installed())
        versions = ", ".join(pin_installed(venv, direct))
        tests_start_s = time.monotonic()
        run_tests(self.workspace, target, venv, folder / "outside")
        return (
            f"works alone: installed in {tests_start_s - start_s:.1f} s, tests "
            f"{time.monotonic() - tests_start_s:.1f} s ({versions})"
        )

    def list_constraints(self, target: Distribution) -> Iterator[str]:
        """Torch and the built wheels, even if other sources have packages of those names."""
        yield f"{TORCH}=={self.torch}"
        yield from map(str, target.lowest_constraints if self.lowest else ())
        for name, wheel in self.wheels.items():
            yield f"{name} @ {wheel.as_uri()}"


def pin_installed(venv: CleanVenv, requirements: Iterable[Requirement]) -> list[str]:
    """The installed ones of some requirements, pinned to their versions."""
    installed = venv.installed()
    names = [canonicalize_name(one.name) for one in requirements]
    return [f"{name}=={installed[name]}" for name in names if name in installed]


def list_direct_requirements(target: Distribution) -> list[Requirement]:
    """The requirements of a package and of the extras that its tests use, without siblings."""
    # A dependency group names the package itself to request its extras.
    tested = (one for one in target.test_dependencies if canonicalize_name(one.name) == target.name)
    extras = [target.extras[extra] for one in tested for extra in one.extras]
    wanted = [*target.dependencies, *(one for extra in extras for one in extra)]
    return [one for one in wanted if canonicalize_name(one.name) not in target.siblings]


def run_tests(workspace: Workspace, target: Distribution, venv: CleanVenv, outside: Path) -> None:
    """Run the tests of a package in a folder from which no source of the repository is found."""
    copy = outside / target.folder.relative_to(workspace.root)
    shutil.copytree(target.folder, copy, ignore=_IGNORED)
    for helper in (Path("tools") / name for name in TEST_TOOLS):
        shutil.copytree(workspace.root / helper, outside / helper, ignore=_IGNORED)
    _copy_settings(workspace, outside)
    report = outside / "report.xml"
    status = venv.run_tests(outside, "--hypothesis-seed=0", f"--junitxml={report}", str(copy))
    if status:
        raise IsolationError(f"the tests of {target.name} ended with status {status}")
    gaps = [
        f"{case.get('classname')}::{case.get('name')}: {reason}"
        for case in ElementTree.parse(report).iter("testcase")
        for skipped in case.iter("skipped")
        if "could not import" in (reason := f"{skipped.get('message')} {skipped.text}")
    ]
    if gaps:
        raise IsolationError(
            f"skipped because a module is missing, which the group test of {target.name} has to "
            "name:\n" + "\n".join(gaps)
        )


def run_together(
    workspace: Workspace, wheels: Mapping[str, Path], scratch: Path, python: str, chosen: list[str]
) -> int:
    """Install all packages into one environment and run the main job's tests there.

    Every module is imported first. ``chosen`` has further arguments for pytest. Returns its status.
    """
    located = [f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()]
    venv = make_venv(scratch / "venv", python, located)
    # Runs of a second leave MLflow too little time to compile its modules next to them.
    venv.install("--compile-bytecode", *located, *list_dev_dependencies(workspace.root))
    for package in workspace.distributions.values():
        check_imports(package, venv)
    print(f"{', '.join(workspace.names)} import from one environment", flush=True)
    outside = scratch / "outside"
    without_tests = shutil.ignore_patterns("tests", "__pycache__", ".*")
    shutil.copytree(workspace.root / "tools", outside / "tools", ignore=without_tests)
    _copy_settings(workspace, outside)
    (outside / _INTEGRATION).mkdir()
    # These tests need the installed packages and the tools, not the packages' sources.
    for file in (workspace.root / _INTEGRATION).glob("*pretrain_*.py"):
        shutil.copy(file, outside / _INTEGRATION)
    return venv.run_tests(outside, _INTEGRATION, *chosen)


def _copy_settings(workspace: Workspace, outside: Path) -> None:
    """The settings of pytest, and the caches of all tests."""
    for file in (workspace.root / "pyproject.toml", *workspace.root.glob("conftest.py")):
        shutil.copy(file, outside)


def collect_needed(workspace: Workspace, targets: Iterable[str]) -> list[Distribution]:
    """The targets and the siblings that they need."""
    names = {other for name in targets for other in (name, *workspace.closure(name))}
    return [workspace[name] for name in workspace.order(names)]


def check_floors(workspace: Workspace, name: str, *, python: str, torch: str) -> Iterator[str]:
    """Test a package with its siblings at the lowest releases that its ranges allow.

    A range such as ``>=0.1`` promises that the code works with the files tagged as 0.1. Those are
    built, the package is installed with them alone, and its tests run. Yields lines of text.
    """
    package = workspace[name]
    tags = find_floor_tags(workspace, package.name)
    for requirement, sibling in sibling_requirements(package, workspace):
        if sibling.name not in tags:
            shown = format_requirement(requirement)
            yield f"no release of {sibling.name} fits {shown}: its present sources are used"
    if not tags:
        yield f"{package.name} has no sibling with a release tag: nothing to test"
        return
    with tempfile.TemporaryDirectory(prefix="floors-") as folder:
        scratch = Path(folder).resolve()
        wheels = build_floor_wheels(workspace, package.name, tags, scratch)
        IsolationRun(workspace, wheels, scratch / "run", python, torch).check(package.name)
    yield f"{package.name} works with {', '.join(tag.name for tag in tags.values())}"


def find_floor_tags(workspace: Workspace, name: str) -> dict[str, ReleaseTag]:
    """The lowest release of each sibling within the ranges of a package."""
    found = {}
    for requirement, sibling in sibling_requirements(workspace[name], workspace):
        for tag in release_tags(workspace.root, sibling.name, workspace.names):
            if requirement.specifier.contains(tag.version, prereleases=True):
                found[sibling.name] = tag
                break
    return found


def build_floor_wheels(
    workspace: Workspace, name: str, tags: dict[str, ReleaseTag], scratch: Path
) -> dict[str, Path]:
    """The wheels of a package and of the siblings that it needs, some at given tags."""
    here = [one for one in collect_needed(workspace, [name]) if one.name not in tags]
    wheels = build_wheels(here, scratch / "here")
    for sibling, tag in tags.items():
        tree = scratch / tag.name
        tree.mkdir()
        folder = workspace[sibling].folder.relative_to(workspace.root).as_posix()
        export_tree(workspace.root, tag.name, tree, folder)
        wheels |= build_wheels([load_workspace(tree)[sibling]], scratch / "tagged")
    return wheels


def check_contents(workspace: Workspace, target: Distribution, venv: CleanVenv) -> None:
    """Check that an installation without extras has exactly the declared contents."""
    check_siblings(workspace, target, venv.installed())
    expected = {target.name, *workspace.closure(target.name)}
    others = [workspace[name] for name in workspace.names if name not in expected]
    check_imports(target, venv, [other.module for other in others])


def check_imports(target: Distribution, venv: CleanVenv, absent: Iterable[str] = ()) -> None:
    """Import every module of a distribution from its installation. ``absent`` must not be found.

    A module may refuse if its message names the extra to install.
    """
    try:
        venv.run_code(_IMPORT_ALL, target.module, target.name, *absent)
    except IsolationError as error:
        raise IsolationError(f"{target.name} cannot be imported:\n{error}") from error


def check_siblings(
    workspace: Workspace, target: Distribution, installed: Mapping[str, str]
) -> None:
    """Compare the installed packages with the declared ones, both ways."""
    expected = {target.name, *workspace.closure(target.name)}
    siblings = {*installed}.intersection(workspace.names)
    if siblings != expected:
        raise IsolationError(
            f"the installation of {target.name} brought {sorted(siblings - {target.name})}, but "
            f"its dependencies lead to {sorted(expected - {target.name})}"
        )
    # Requirements are transitive, so each sibling may be the package that needs torch.
    needs_torch = any(
        one.name == TORCH for name in expected for one in workspace[name].dependencies
    )
    if (TORCH in installed) != needs_torch:
        raise IsolationError(
            f"{target.name} {'needs' if needs_torch else 'does not need'} torch, which is "
            f"{'missing' if needs_torch else 'installed'}"
        )
