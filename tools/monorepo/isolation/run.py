"""One distribution in an environment of its own: what came with it, and whether its tests pass."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from monorepo.isolation.checks import TORCH, IsolationError, check_contents, check_siblings
from monorepo.isolation.venv import CleanVenv, InstallError, clean_environment, make_venv
from monorepo.workspace import Distribution, Workspace

TEST_TOOL = "rank_testing"
_IGNORED = shutil.ignore_patterns("src", "__pycache__", ".*")


@dataclass(frozen=True)
class IsolationRun:
    """What all targets of one run share.

    Attributes:
        workspace: The repository.
        wheels: The wheel of each distribution and of all that it needs.
        scratch: An empty folder outside the repository.
        python: The interpreter to test on.
        torch: The version of torch to install.
        lowest: Take the lowest version that each requirement but torch allows.
    """

    workspace: Workspace
    wheels: Mapping[str, Path]
    scratch: Path
    python: str
    torch: str
    lowest: bool = False

    def check(self, name: str) -> str:
        """Install one distribution alone and run its tests there; returns what was found."""
        target = self.workspace[name]
        start_s = time.monotonic()
        venv = make_venv(
            self.scratch / target.name / "venv", self.python, self._constraints(target)
        )
        wheel = f"{target.name} @ {self.wheels[target.name].as_uri()}"
        if self.lowest:
            install_lowest([wheel], _floors(target), venv)
        else:
            venv.install([wheel])
        check_contents(self.workspace, target, venv)
        versions = _versions(target, venv)
        # What the tests need must not raise what is under test.
        held = [f"{name}=={version}" for name, version in versions.items()]
        venv.install([*map(str, target.test_dependencies), *held])
        check_siblings(self.workspace, target, venv.installed())
        tests_start_s = time.monotonic()
        run_tests(self.workspace, target, venv, self.scratch / target.name / "outside")
        now_s = time.monotonic()
        return (
            f"stands alone: installed in {tests_start_s - start_s:.1f} s, tests "
            f"{now_s - tests_start_s:.1f} s ({', '.join(held)})"
        )

    def _constraints(self, target: Distribution) -> Iterator[str]:
        """Torch and the wheels that were built, wherever else those names can be had."""
        yield f"{TORCH}=={self.torch}"
        yield from map(str, target.lowest_constraints if self.lowest else ())
        for name, wheel in self.wheels.items():
            yield f"{name} @ {wheel.as_uri()}"


def install_lowest(wheels: Sequence[str], requirements: Sequence[str], venv: CleanVenv) -> None:
    """Install wheels, the lowest version of each requirement, and the newest of what those need.

    They are pinned: a resolver that may go above a floor does, where that lets it take something
    else at its newest.
    """
    pins = [f"{name}=={version}" for name, version in venv.lowest_versions(requirements).items()]
    try:
        venv.install([*wheels, *requirements, *pins])
    except InstallError as error:
        told = f"floors that cannot be installed together, raise one of them: {', '.join(pins)}"
        raise IsolationError(f"{told}\n{error}") from error


def _floors(target: Distribution) -> list[str]:
    """The requirements whose lowest versions are tested: those that nothing pins."""
    return [str(one) for one in direct_requirements(target) if one.name != TORCH]


def _versions(target: Distribution, venv: CleanVenv) -> dict[str, str]:
    """What is installed of the distributions that a target asks for directly."""
    installed = venv.installed()
    asked = (canonicalize_name(one.name) for one in direct_requirements(target))
    return {name: installed[name] for name in asked if name in installed}


def direct_requirements(target: Distribution) -> list[Requirement]:
    """What a distribution and the extras that its tests use ask for, without siblings."""
    extras = [
        one for test in target.test_dependencies if is_own(target, test) for one in test.extras
    ]
    wanted = [*target.dependencies, *(one for extra in extras for one in target.extras[extra])]
    return [one for one in wanted if canonicalize_name(one.name) not in target.siblings]


def is_own(target: Distribution, requirement: Requirement) -> bool:
    """Whether a requirement is the distribution itself, which is how a group asks for extras."""
    return canonicalize_name(requirement.name) == target.name


def run_tests(workspace: Workspace, target: Distribution, venv: CleanVenv, outside: Path) -> None:
    """Run the tests of a distribution where nothing of the repository can be imported."""
    copy = outside / target.folder.relative_to(workspace.root)
    shutil.copytree(target.folder, copy, ignore=_IGNORED)
    helper = Path("tools") / TEST_TOOL
    shutil.copytree(workspace.root / helper, outside / helper, ignore=_IGNORED)
    shutil.copy(workspace.root / "pyproject.toml", outside)
    report = outside / "report.xml"
    command = [
        str(venv.python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
    ]
    done = subprocess.run(
        [*command, f"--junitxml={report}", str(copy)],
        cwd=outside,
        env=clean_environment(),
        check=False,
    )
    if done.returncode:
        raise IsolationError(f"the tests of {target.name} ended with status {done.returncode}")
    gaps = gaps_in(report)
    if gaps:
        raise IsolationError(
            f"skipped for want of a module, which the group test of {target.name} has to name:\n"
            + "\n".join(gaps)
        )


def gaps_in(report: Path) -> list[str]:
    """The tests of a JUnit report that were skipped because something could not be imported."""
    gaps = []
    for case in ElementTree.parse(report).iter("testcase"):
        for skipped in case.iter("skipped"):
            reason = f"{skipped.get('message')} {skipped.text}"
            if "could not import" in reason:
                gaps.append(f"{case.get('classname')}::{case.get('name')}: {reason}")
    return gaps
