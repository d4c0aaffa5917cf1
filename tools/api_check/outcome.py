"""The check of one package, from the tag to the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from api_check.compare import Comparison
from api_check.findings import Finding, Weight, cover
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
        # Files, not git objects: griffe reads folders, and the repository must not be checked out.
        with _tree_at(root, current) as now:
            if baseline is None:
                tag = last_tag(root, package, now.names, up_to=now[package].version)
                if tag is None:
                    return Outcome(package, PASSED, "no release tag yet, nothing to compare with")
                baseline = tag.name
            with _tree_at(root, baseline) as before:
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
    findings = judge(comparison.list_findings(), package, (old.version, version), now)
    failed = sum(one.fails(strict=strict) for one in findings)
    notice = f"{version} against {baseline}: {len(findings)} findings, {failed} of them fail"
    return Outcome(package, FAILED if failed else PASSED, notice, findings)


@contextmanager
def _tree_at(root: Path, revision: str | None) -> Iterator[Workspace]:
    """The packages of a revision in a temporary folder, or of the working tree if it is None."""
    if revision is None:
        yield load_workspace(root)
        return
    with TemporaryDirectory(prefix="api-check-") as folder:
        export_tree(root, revision, Path(folder), PACKAGES_FOLDER)
        yield load_workspace(Path(folder))


def announces_breakage(old: Version, new: Version) -> bool:
    """Whether a step between two versions allows incompatible changes: 0.1 to 0.2, 1 to 2."""
    if new.major != old.major:
        return new.major > old.major
    return old.major == 0 and new.minor > old.minor


def judge(
    findings: Sequence[Finding],
    package: str,
    step: tuple[Version, Version],
    workspace: Workspace,
) -> list[Finding]:
    """Mark announced breaks, and add the dependants that accept both sides of a break."""
    breaks = any(one.weight is Weight.BREAKAGE for one in findings)
    if not breaks or not announces_breakage(*step):
        return list(findings)
    return [*cover(findings), *_find_unrevisited(package, step, workspace)]


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
