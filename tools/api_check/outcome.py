"""The check of one package, from the tag to the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from api_check.compare import Comparison
from api_check.findings import Finding
from api_check.policy import judge
from api_check.surface import read_surface
from api_check.trees import CannotCheckError, tree_at
from monorepo.git_tags import GitError, commit_exists, last_tag
from monorepo.workspace import Workspace, WorkspaceError

PASSED, FAILED, COULD_NOT_CHECK = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """The result for one package.

    Attributes:
        package: The distribution.
        status: 0, 1 or 2, as the exit status.
        notice: What happened, in a line.
        findings: The differences.
    """

    package: str
    status: int
    notice: str
    findings: Sequence[Finding] = field(default=())


def check_package(
    root: Path,
    package: str,
    *,
    baseline: str | None = None,
    current: str | None = None,
    strict: bool = False,
    as_version: Version | None = None,
) -> Outcome:
    """Compare the public names of a package with those of a release, by default the last one."""
    try:
        for revision in (baseline, current):
            if revision is not None and not commit_exists(root, revision):
                raise CannotCheckError(f"{revision!r} is not a revision of this repository")
        with tree_at(root, current) as now:
            if baseline is None:
                tag = last_tag(root, package, now.names, up_to=now[package].version)
                if tag is None:
                    return Outcome(package, PASSED, "no release tag yet, nothing to compare with")
                baseline = tag.name
            with tree_at(root, baseline) as before:
                version = as_version or now[package].version
                return _compare(package, baseline, before, now, version, strict)
    except (CannotCheckError, GitError, WorkspaceError) as error:
        return Outcome(package, COULD_NOT_CHECK, str(error))


def _compare(
    package: str,
    baseline: str,
    before: Workspace,
    now: Workspace,
    version: Version,
    strict: bool,
) -> Outcome:
    if package not in before.distributions:
        return Outcome(package, PASSED, f"not part of {baseline}, nothing to compare with")
    old, new = before[package], now[package]
    comparison = Comparison(
        package, read_surface(old), read_surface(new), version, (now.root, before.root)
    )
    findings = judge(comparison.findings(), package, (old.version, version), now)
    failed = sum(one.fails(strict=strict) for one in findings)
    notice = f"{version} against {baseline}: {len(findings)} findings, {failed} of them fail"
    return Outcome(package, FAILED if failed else PASSED, notice, findings)
