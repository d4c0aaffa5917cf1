"""What has to hold before a package is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from monorepo.api_breaks import incompatible_changes, refusals, since_last_release
from monorepo.changelog import (
    CHANGELOG,
    FOLDER,
    ChangelogError,
    announces_a_break,
    fragments,
    section,
)
from monorepo.git_tags import last_tag, parse_tag, release_tags
from monorepo.ranges import misfits, sibling_requirements, spelled
from monorepo.release_archives import archive_problems, build_archives
from monorepo.release_show import shipped_changes
from monorepo.wheels import BuildError
from monorepo.workspace import Distribution, Workspace


@dataclass(frozen=True)
class Verification:
    """What was found out about a release.

    Attributes:
        refused: Why it may not be published, a line each; empty where it may.
        notes: What could not be checked, and why that is all right.
    """

    refused: tuple[str, ...]
    notes: tuple[str, ...]


def verify_release(
    workspace: Workspace, name: str, *, tag: str | None = None, archives: Path | None = None
) -> Verification:
    """Check a package that is about to be published, or one that could be.

    Args:
        workspace: The packages.
        name: The one to check.
        tag: The tag that was pushed; None while there is none.
        archives: A folder with its wheel and its sdist; None builds them for the check.
    """
    package = workspace[name]
    notes = []
    if not any(release_tags(workspace.root, each, workspace.names) for each in workspace.names):
        notes.append("there are no release tags: nothing earlier to compare with")
    refused = [
        *_tag_problems(workspace, package, tag),
        *_bump_problems(workspace, package, tag),
        *(str(one) for one in misfits(workspace)),
        *_changelog_problems(workspace, package, tag),
        *_archive_problems(package, archives),
    ]
    if tag is not None:
        refused.extend(_missing_siblings(workspace, package))
    return Verification(tuple(refused), tuple(notes))


def _tag_problems(workspace: Workspace, package: Distribution, text: str | None) -> Iterator[str]:
    if text is None:
        return
    try:
        tag = parse_tag(text, workspace.names)
    except ValueError as error:
        yield str(error)
        return
    if tag.package != package.name:
        yield f"{tag.name} is a tag of {tag.package}, not of {package.name}"
    elif tag.version != package.version:
        yield f"{tag.name} is tagged, but {package.version_file.name} says {package.version}"


def _bump_problems(workspace: Workspace, package: Distribution, tag: str | None) -> Iterator[str]:
    last = last_tag(workspace.root, package.name, workspace.names)
    if last is None:
        return
    if last.version > package.version:
        yield f"{package.name} {package.version} is older than its last release, {last.name}"
    elif last.version == package.version:
        changed = shipped_changes(workspace, package, last.name)
        if changed:
            yield (
                f"{package.name} changed since {last.name} and still says {package.version}: "
                f"{', '.join(changed)}"
            )
        elif tag is None:
            yield f"{package.name} {package.version} is released already and did not change"


def _changelog_problems(
    workspace: Workspace, package: Distribution, tag: str | None
) -> Iterator[str]:
    text = (package.folder / CHANGELOG).read_text(encoding="utf-8")
    said = section(text, package.version)
    if said is None and (tag is not None or _released(workspace, package)):
        yield f"{CHANGELOG} of {package.name} has no '## {package.version} (YYYY-MM-DD)'"
    try:
        left = fragments(package)
    except ChangelogError as error:
        yield f"{package.name}: {error}"
        left = []
    if left and tag is not None:
        yield f"{package.name} still has {FOLDER}/{left[0].file.name}; run release prepare"
    outcome = since_last_release(workspace, package.name, package.version)
    yield from refusals(outcome)
    breaks = incompatible_changes(outcome)
    if breaks and not announces_a_break(said or ""):
        yield f"{breaks[0]}, and {CHANGELOG} has nothing under Changed or Removed"


def _released(workspace: Workspace, package: Distribution) -> bool:
    return last_tag(workspace.root, package.name, workspace.names) is not None


def _archive_problems(package: Distribution, archives: Path | None) -> Iterator[str]:
    if archives is not None:
        yield from archive_problems(package, archives)
        return
    with TemporaryDirectory(prefix="release-") as folder:
        try:
            build_archives(package, Path(folder))
        except BuildError as error:
            yield str(error)
            return
        yield from archive_problems(package, Path(folder))


def _missing_siblings(workspace: Workspace, package: Distribution) -> Iterator[str]:
    """Siblings that users could not install yet: they go first."""
    for requirement, sibling in sibling_requirements(package, workspace):
        released = release_tags(workspace.root, sibling.name, workspace.names)
        if not any(requirement.specifier.contains(one.version, True) for one in released):
            yield f"{package.name} requires {spelled(requirement)}; release {sibling.name} first"
