"""Make a release: version, changelog and ranges as one change, and then its tag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from hatchling.version.scheme.standard import StandardScheme
from packaging.requirements import Requirement
from packaging.version import Version

from monorepo import changelog, ranges
from monorepo.changelog import CHANGELOG, FOLDER
from monorepo.git_tags import ReleaseTag, commit_exists, git, last_tag
from monorepo.release import verify
from monorepo.workspace import PACKAGES_FOLDER, VERSION_LINE, Distribution, Workspace

REMOTE = "origin"


class ReleaseError(ValueError):
    """The release cannot be made. The text is the reason."""


@dataclass(frozen=True)
class Plan:
    """A release that is planned and not yet written.

    Attributes:
        tag: The tag to set once it is merged.
        contents: The new text of every file that changes.
        deleted: Files to delete.
        notes: The steps, a line each.
    """

    tag: ReleaseTag
    contents: dict[Path, str]
    deleted: tuple[Path, ...]
    notes: tuple[str, ...]


def plan_release(workspace: Workspace, name: str, step: str | None, day: date) -> Plan:
    """Plan the changes of a release, writing nothing. Without ``step`` the version stays."""
    package = workspace[name]
    last = last_tag(workspace.root, package.name, workspace.names)
    version = _raise_version(package, step, last)
    outcome = verify.compare_with_last_release(workspace, package.name, version)
    breaks = verify.list_breaks(outcome)
    if refusals := verify.list_refusals(outcome, dependants=False):
        raise ReleaseError(f"{package.name} {version}: " + "; ".join(refusals))
    fragments = changelog.list_fragments(package)
    try:
        folded = changelog.fold(package, version, day)
    except changelog.ChangelogError as error:
        raise ReleaseError(f"{package.name}: {error}") from error
    if breaks and not changelog.announces_a_break(changelog.find_section(folded, version) or ""):
        raise ReleaseError(
            f"{package.name}: {breaks[0]} breaks users, and the changelog has nothing under "
            f"Changed or Removed; add {FOLDER}/SLUG.changed.md or {FOLDER}/SLUG.removed.md"
        )
    contents = {
        package.folder / CHANGELOG: folded,
        package.version_file: VERSION_LINE.sub(
            rf"\g<1>{version}", package.version_file.read_text(encoding="utf-8")
        ),
    }
    notes = [
        f"{package.name} {package.version} -> {version}",
        *(f"{CHANGELOG} includes {FOLDER}/{file.name}" for file in fragments),
    ]
    broken_since = last.version if breaks and last is not None else None
    for dependant in workspace.distributions.values():
        for requirement, sibling in ranges.sibling_requirements(dependant, workspace):
            if sibling.name == package.name:
                notes.append(_move_range(dependant, requirement, version, broken_since, contents))
    return Plan(
        tag=ReleaseTag(package.name, version),
        contents={
            path: text
            for path, text in contents.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        },
        deleted=tuple(fragments),
        notes=(*notes, *(f"breaks users: {one}" for one in breaks)),
    )


def _raise_version(package: Distribution, step: str | None, last: ReleaseTag | None) -> Version:
    if step is None or step == str(package.version):
        if last is not None and last.version >= package.version:
            raise ReleaseError(
                f"{package.name} {package.version} is not newer than {last.name}; "
                "choose how to raise it: major, minor, patch, or a version"
            )
        return package.version
    try:
        # The scheme that hatch applies to these files.
        raised = StandardScheme(str(package.folder), {}).update(step, str(package.version), {})
    except ValueError as error:
        raise ReleaseError(f"{package.name}: {error}") from error
    return Version(raised)


def _move_range(
    dependant: Distribution, requirement: Requirement, version: Version,
    broken_since: Version | None, contents: dict[Path, str],
) -> str:  # fmt: skip
    """Add the changed files of a dependant to ``contents`` and return a note.

    Without a break the cap moves above the new version. With a break the floor moves as well,
    since no code works on both sides of it.
    """
    before = ranges.format_requirement(requirement)
    fits = requirement.specifier.contains(version, prereleases=True)
    both = broken_since is not None and requirement.specifier.contains(broken_since, True)
    if fits and not both:
        return f"{dependant.name} accepts it with {before}"
    moved = None if both else ranges.widen_range(requirement, version)
    now = ranges.write_requirement(requirement, moved or ranges.make_range(version))
    file = dependant.folder / "pyproject.toml"
    text = contents.get(file, file.read_text(encoding="utf-8"))
    contents[file] = _replace_requirement(file, text, requirement, now)
    slug = f"takes-{requirement.name}-{str(version).replace('.', '-')}"
    fragment = dependant.folder / FOLDER / f"{slug}.changed.md"
    contents[fragment] = f"Requires `{now}`, before `{before}`.\n"
    return f"{dependant.name}: {before} -> {now}"


def _replace_requirement(file: Path, text: str, old: Requirement, new: str) -> str:
    """The text of a pyproject.toml with one requirement replaced, the rest untouched."""
    for literal in re.findall(rf"""["']({re.escape(old.name)}(?![\w.-])[^"']*)["']""", text):
        with suppress(ValueError):
            if Requirement(literal) == old:
                return text.replace(literal, new)
    raise ReleaseError(f"{file} does not contain {ranges.format_requirement(old)} on one line")


def write(workspace: Workspace, plan: Plan) -> None:
    """Write a release into packages without uncommitted work, so git can restore them."""
    _refuse_open_work(workspace)
    for path, text in plan.contents.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in plan.deleted:
        path.unlink()


def _refuse_open_work(workspace: Workspace) -> None:
    open_work = git(workspace.root, "status", "--porcelain", "--", PACKAGES_FOLDER).split("\n")[0]
    if open_work:
        raise ReleaseError(f"commit or stash your work first, such as {open_work.split()[-1]}")


def unpushed(workspace: Workspace, names: Sequence[str]) -> list[ReleaseTag]:
    """The tags of the present versions that the remote lacks, siblings first."""
    existing = git(workspace.root, "ls-remote", "--tags", REMOTE).split()
    tags = [ReleaseTag(name, workspace[name].version) for name in workspace.choose(names)]
    return [tag for tag in tags if f"refs/tags/{tag.name}" not in existing]


def push(workspace: Workspace, tag: ReleaseTag) -> None:
    """Verify a release, set its tag and push it alone: the next one is verified after it."""
    _refuse_open_work(workspace)
    refused = verify.verify_release(workspace, tag.package, tag=tag.name).refused
    if refused:
        raise ReleaseError("\n".join(refused))
    # The tag may exist already if an earlier push of it failed.
    if not commit_exists(workspace.root, f"refs/tags/{tag.name}"):
        git(workspace.root, "tag", tag.name)
    git(workspace.root, "push", REMOTE, f"refs/tags/{tag.name}")
