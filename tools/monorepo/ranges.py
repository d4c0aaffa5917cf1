"""Every range that a package puts on a sibling has to accept the sibling's present version."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from monorepo.workspace import Distribution, Workspace


def find_misfits(workspace: Workspace) -> Iterator[str]:
    """The requirements between packages that are no range around the sibling's version."""
    for package in workspace.distributions.values():
        for requirement, sibling in sibling_requirements(package, workspace):
            if not requirement.specifier.contains(sibling.version, prereleases=True):
                fault = f"which leaves out {sibling.name} {sibling.version} of this repository"
            elif {one.operator for one in requirement.specifier} != {">=", "<"}:
                fault = "which has to be a range with a floor and a cap"
            else:
                continue
            fresh = make_range(sibling.version)
            kept = widen_range(requirement, sibling.version) or fresh
            advice = f'"{write_requirement(requirement, kept)}"'
            if kept != fresh:
                other = write_requirement(requirement, fresh)
                advice += f', or "{other}" if it needs the new version'
            shown = format_requirement(requirement)
            yield f"{package.name} requires {shown}, {fault}; write {advice}"


def sibling_requirements(
    package: Distribution, workspace: Workspace
) -> Iterator[tuple[Requirement, Distribution]]:
    """The requirements of a package and its extras that siblings satisfy."""
    for requirement in package.requirements:
        sibling = workspace.distributions.get(requirement.name)
        if sibling is not None:
            yield requirement, sibling


def next_breaking(version: Version) -> str:
    """The first version that may break users of a given one, as a cap: 0.1.4 -> 0.2, 2.3.0 -> 3."""
    return str(version.major + 1) if version.major else f"0.{version.minor + 1}"


def make_range(version: Version) -> str:
    """The range from a version until the next break: 0.2.0 -> ``>=0.2,<0.3``."""
    plain = Version(version.public)
    floor = str(plain).removesuffix(".0") if not plain.is_prerelease else str(plain)
    return f">={floor},<{next_breaking(version)}"


def widen_range(requirement: Requirement, version: Version) -> str | None:
    """The range with its cap raised above a version, or None if only a new range will do."""
    floors = [one for one in requirement.specifier if one.operator == ">="]
    if len(floors) != 1 or Version(floors[0].version) > version:
        return None
    return f">={floors[0].version},<{next_breaking(version)}"


def write_requirement(requirement: Requirement, specifier: str) -> str:
    """A requirement with another range, as written in a pyproject.toml."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}{extras}{specifier}{marker}"


def format_requirement(requirement: Requirement) -> str:
    """A requirement with its lower bound first, as people write it."""
    bounds = sorted(
        requirement.specifier, key=lambda one: (not one.operator.startswith(">"), str(one))
    )
    return write_requirement(requirement, ",".join(str(one) for one in bounds))
