"""What the check of public names says about a release."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from api_check.findings import Finding, Weight
from api_check.outcome import COULD_NOT_CHECK, PASSED, Outcome, check_package
from monorepo.git_tags import last_tag
from monorepo.workspace import Workspace


def since_last_release(workspace: Workspace, package: str, version: Version) -> Outcome:
    """Compare the working tree with the last release below a version.

    Args:
        workspace: The packages.
        package: The one that is released.
        version: The version that it gets, which may not be in its files yet.
    """
    tag = last_tag(workspace.root, package, workspace.names, below=version)
    if tag is None:
        return Outcome(package, PASSED, f"no release before {version}, nothing to compare with")
    return check_package(workspace.root, package, baseline=tag.name, as_version=version)


def incompatible_changes(outcome: Outcome) -> list[str]:
    """The changes that users have to follow, a line each, covered by the version or not."""
    return _lines(one for one in outcome.findings if one.weight is Weight.BREAKAGE)


def refusals(outcome: Outcome, *, dependants: bool = True) -> list[str]:
    """Why a release can't be made, a line each.

    Args:
        outcome: Of the comparison.
        dependants: Whether ranges that accept both sides of a break count.
    """
    if outcome.status == COULD_NOT_CHECK:
        return [outcome.notice]
    return _lines(
        one
        for one in outcome.findings
        if one.fails(strict=False) and (dependants or one.kind != "DEPENDANT_RANGE")
    )


def _lines(findings: Iterable[Finding]) -> list[str]:
    return [
        f"{one.kind} {one.path}: {one.old or '(nothing)'} -> {one.new or '(nothing)'}"
        for one in findings
    ]
