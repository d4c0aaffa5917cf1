"""The check of one package, from the tag to the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from api_check.compare import Comparison, Finding, Weight
from api_check.surface import CannotCheckError, read_surface
from monorepo.git_tags import GitError, commit_exists, export_tree, last_tag
from monorepo.ranges import sibling_requirements
from monorepo.workspace import PACKAGES_FOLDER, Workspace, WorkspaceError, load_workspace

PASSED, FAILED, COULD_NOT_CHECK = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """The result for one package.

    Attributes:
        package: The distribution.
        status: 0, 1 or 2, as the exit status.
        notice: A summary, in a line.
        findings: The differences.
    """

    package: str
    status: int
    notice: str
    findings: Sequence[Finding] = field(default=())


def check_package(
    root: Path, package: str, *, baseline: str | None = None, as_version: Version | None = None
) -> Outcome:
    """Compare the public names of a package with those of a release, by default the last one."""
    try:
        now = load_workspace(root)
        if baseline is None:
            tag = last_tag(root, package, now.names, up_to=now[package].version)
            if tag is None:
                return Outcome(package, PASSED, "no release tag yet, nothing to compare with")
            baseline = tag.name
        elif not commit_exists(root, baseline):
            raise CannotCheckError(f"{baseline!r} is not a revision of this repository")
        # Files, not git objects: griffe reads folders, and the repository must not be checked out.
        with TemporaryDirectory(prefix="api-check-") as folder:
            export_tree(root, baseline, Path(folder), PACKAGES_FOLDER)
            before = load_workspace(Path(folder))
            return _compare(package, baseline, before, now, as_version or now[package].version)
    except (CannotCheckError, GitError, WorkspaceError) as error:
        return Outcome(package, COULD_NOT_CHECK, str(error))


def _compare(
    package: str, baseline: str, before: Workspace, now: Workspace, version: Version
) -> Outcome:
    if package not in before.distributions:
        return Outcome(package, PASSED, f"not part of {baseline}, nothing to compare with")
    old, new = before[package], now[package]
    comparison = Comparison(
        package, read_surface(old), read_surface(new), version, (now.root, before.root)
    )
    findings = judge(comparison.list_findings(), package, (old.version, version), now)
    failed = sum(one.fails for one in findings)
    notice = f"{version} against {baseline}: {len(findings)} findings, {failed} of them fail"
    return Outcome(package, FAILED if failed else PASSED, notice, findings)


def announces_breakage(old: Version, new: Version) -> bool:
    """Whether a step between two versions allows incompatible changes: 0.1 to 0.2, 1 to 2."""
    if new.major != old.major:
        return new.major > old.major
    return old.major == 0 and new.minor > old.minor


def judge(
    findings: Sequence[Finding], package: str, step: tuple[Version, Version], workspace: Workspace
) -> list[Finding]:
    """Mark announced breaks, and add the dependants that accept both sides of a break."""
    breaks = any(one.weight is Weight.BREAKAGE for one in findings)
    if not breaks or not announces_breakage(*step):
        return list(findings)
    covered = [replace(one, covered=one.weight is Weight.BREAKAGE) for one in findings]
    return [*covered, *_find_unrevisited(package, step, workspace)]


def _find_unrevisited(
    package: str, step: tuple[Version, Version], workspace: Workspace
) -> Iterator[Finding]:
    for name in workspace.direct_dependants(package):
        dependant = workspace[name]
        for requirement, sibling in sibling_requirements(dependant, workspace):
            both = all(requirement.specifier.contains(one, prereleases=True) for one in step)
            if sibling.name == package and both:
                file = (dependant.folder / "pyproject.toml").relative_to(workspace.root).as_posix()
                advice = f"has to leave out {step[0]} or {step[1]}, between which {package} broke"
                yield Finding(
                    package, "DEPENDANT_RANGE", name, str(requirement), advice, file, 0,
                    Weight.BROKEN_PROMISE,
                )  # fmt: skip
