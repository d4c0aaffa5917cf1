"""Every range that a package puts on a sibling has to take the sibling as it is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from monorepo.workspace import REPOSITORY, Distribution, Workspace, load_workspace


@dataclass(frozen=True)
class Misfit:
    """A requirement that refuses the sibling beside it, pins it, or lacks a cap.

    Attributes:
        package: Whose requirement.
        requirement: As written.
        version: The version of the sibling in the working tree.
        advice: What to write instead.
    """

    package: str
    requirement: Requirement
    version: Version
    advice: str

    def __str__(self) -> str:
        """One line that names all of it."""
        if self.requirement.specifier.contains(self.version, prereleases=True):
            fault = "which has to be a range with a floor and a cap"
        else:
            fault = f"which leaves out {self.requirement.name} {self.version} of this repository"
        return f"{self.package} requires {spelled(self.requirement)}, {fault}; write {self.advice}"


def misfits(workspace: Workspace) -> list[Misfit]:
    """The requirements between packages that are no range around the sibling beside them."""
    return [
        Misfit(package.name, requirement, sibling.version, _advice(requirement, sibling.version))
        for package in workspace.distributions.values()
        for requirement, sibling in sibling_requirements(package, workspace)
        if not requirement.specifier.contains(sibling.version, prereleases=True)
        or {one.operator for one in requirement.specifier} != {">=", "<"}
    ]


def sibling_requirements(
    package: Distribution, workspace: Workspace
) -> Iterator[tuple[Requirement, Distribution]]:
    """The requirements of a package, those of its extras included, that siblings meet."""
    for requirement in package.requirements:
        sibling = workspace.distributions.get(requirement.name)
        if sibling is not None:
            yield requirement, sibling


def next_breaking(version: Version) -> str:
    """The first version that may break users of a given one, as a cap: 0.1.4 -> 0.2, 2.3.0 -> 3."""
    return str(version.major + 1) if version.major else f"0.{version.minor + 1}"


def fresh_range(version: Version) -> str:
    """The range from a version until the next break: 0.2.0 -> ``>=0.2,<0.3``."""
    plain = Version(version.public)
    floor = str(plain).removesuffix(".0") if not plain.is_prerelease else str(plain)
    return f">={floor},<{next_breaking(version)}"


def widened(requirement: Requirement, version: Version) -> str | None:
    """The range with its cap moved behind a version; None where only a fresh one will do."""
    floors = [one for one in requirement.specifier if one.operator == ">="]
    if len(floors) != 1 or Version(floors[0].version) > version:
        return None
    return f">={floors[0].version},<{next_breaking(version)}"


def written(requirement: Requirement, specifier: str) -> str:
    """A requirement with another range, as it is written."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}{extras}{specifier}{marker}"


def spelled(requirement: Requirement) -> str:
    """A requirement with its lower bound first, as people write it."""
    bounds = sorted(
        requirement.specifier, key=lambda one: (not one.operator.startswith(">"), str(one))
    )
    return written(requirement, ",".join(str(one) for one in bounds))


def _advice(requirement: Requirement, version: Version) -> str:
    fresh = f'"{written(requirement, fresh_range(version))}"'
    kept = widened(requirement, version)
    if kept is None:
        return fresh
    return f'"{written(requirement, kept)}", or {fresh} if it needs the new version'


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all ranges; return 1 and print what to write where one does not fit."""
    parser = argparse.ArgumentParser(prog="python -m monorepo.ranges", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    workspace = load_workspace(parser.parse_args(arguments).root)
    found = misfits(workspace)
    if found:
        print("\n".join(str(one) for one in found), file=sys.stderr)
        return 1
    count = sum(
        len(list(sibling_requirements(package, workspace)))
        for package in workspace.distributions.values()
    )
    print(f"{count} ranges between {len(workspace.names)} packages fit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
