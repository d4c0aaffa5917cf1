"""Checks before a package is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from packaging.version import Version

from api_check.findings import Weight
from api_check.outcome import COULD_NOT_CHECK, PASSED, Outcome, check_package
from monorepo.changelog import (
    CHANGELOG,
    FOLDER,
    ChangelogError,
    announces_a_break,
    fragments,
    rendered,
    section,
)
from monorepo.git_tags import (
    changed_files,
    commit_exists,
    is_in,
    last_tag,
    parse_tag,
    published_branch,
    release_tags,
)
from monorepo.ranges import misfits, sibling_requirements, spelled
from monorepo.release.archives import archive_problems, build_archives
from monorepo.workspace import Distribution, Workspace, read_toml


@dataclass(frozen=True)
class Verification:
    """What was found out about a release.

    Attributes:
        refused: Why it may not be published, a line each; empty where it may.
        notes: What could not be checked, and what is still to do before the tag.
    """

    refused: tuple[str, ...]
    notes: tuple[str, ...]


def verify_release(workspace: Workspace, name: str, *, tag: str | None = None) -> Verification:
    """Check the sources of a package before it is published, and the tag that says so."""
    package = workspace[name]
    notes = []
    if not any(release_tags(workspace.root, each, workspace.names) for each in workspace.names):
        notes.append("there are no release tags: nothing earlier to compare with")
    refused = [
        *_bump_problems(workspace, package, tag),
        *misfits(workspace),
        *_changelog_problems(workspace, package),
    ]
    open_ends = [
        *_unfolded(package),
        *_missing_siblings(workspace, package),
        *_address_problems(package),
    ]
    if tag is None:
        notes += [f"before its tag: {one}" for one in open_ends]
    else:
        refused = [*_tag_problems(workspace, package, tag), *refused, *open_ends]
    return Verification(tuple(refused), tuple(notes))


def _tag_problems(workspace: Workspace, package: Distribution, text: str) -> Iterator[str]:
    try:
        tag = parse_tag(text, workspace.names)
    except ValueError as error:
        yield str(error)
        return
    if tag.package != package.name:
        yield f"{tag.name} is a tag of {tag.package}, not of {package.name}"
    elif tag.version != package.version:
        yield f"{tag.name} is tagged, but {package.version_file.name} says {package.version}"
    yield from _branch_problems(workspace.root, tag.name)


def _branch_problems(root: Path, tag: str) -> Iterator[str]:
    """Only what was merged is published: the files at hand, which the tag has to be set at."""
    main = published_branch(root)
    if main is None:
        yield "there is no branch main to look for the tag in: git fetch origin main"
    elif not is_in(root, "HEAD", main):
        yield f"HEAD is no commit of {main}; merge it first"
    at = f"refs/tags/{tag}"
    if commit_exists(root, at) and not (is_in(root, at, "HEAD") and is_in(root, "HEAD", at)):
        yield f"{tag} is set at another commit than HEAD; look there, or git tag --delete {tag}"


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


def _changelog_problems(workspace: Workspace, package: Distribution) -> Iterator[str]:
    text = (package.folder / CHANGELOG).read_text(encoding="utf-8")
    said = section(text, package.version) or ""
    if fragments(package):
        try:
            said += rendered(package, package.version, date.min)
        except ChangelogError as error:
            yield f"{package.name}: {error}"
    elif not said:
        yield f"{CHANGELOG} of {package.name} has no '## {package.version} (YYYY-MM-DD)'"
    outcome = since_last_release(workspace, package.name, package.version)
    yield from refusals(outcome)
    breaks = incompatible_changes(outcome)
    if breaks and not announces_a_break(said):
        yield f"{breaks[0]}, and {CHANGELOG} has nothing under Changed or Removed"


def _unfolded(package: Distribution) -> Iterator[str]:
    left = fragments(package)
    if left:
        yield f"{package.name} still has {FOLDER}/{left[0].name}; run release prepare"


def verify_archives(package: Distribution, archives: Path | None) -> list[str]:
    """Check what is uploaded, a line for each fault; without a folder it is built here."""
    if archives is not None:
        return list(archive_problems(package, archives))
    with TemporaryDirectory(prefix="release-") as folder:
        build_archives(package, Path(folder))
        return verify_archives(package, Path(folder))


def _missing_siblings(workspace: Workspace, package: Distribution) -> Iterator[str]:
    """Siblings that users could not install yet: they go first."""
    for requirement, sibling in sibling_requirements(package, workspace):
        released = release_tags(workspace.root, sibling.name, workspace.names)
        if not any(requirement.specifier.contains(one.version, True) for one in released):
            yield f"{package.name} requires {spelled(requirement)}; release {sibling.name} first"


def _address_problems(package: Distribution) -> Iterator[str]:
    """Links of the index page that lead to the reserved name of the sources as they come."""
    urls = read_toml(package.folder / "pyproject.toml")["project"].get("urls", {})
    if not urls or any(urlsplit(url).netloc.endswith(".example") for url in urls.values()):
        yield f"[project.urls] of {package.name} have to name the repository, with CITATION.cff"


def since_last_release(workspace: Workspace, package: str, version: Version) -> Outcome:
    """Compare the working tree with the last release below a version."""
    tag = last_tag(workspace.root, package, workspace.names, below=version)
    if tag is None:
        return Outcome(package, PASSED, f"no release before {version}, nothing to compare with")
    return check_package(workspace.root, package, baseline=tag.name, as_version=version)


def incompatible_changes(outcome: Outcome) -> list[str]:
    """The changes that users have to follow, a line each, covered by the version or not."""
    return [str(one) for one in outcome.findings if one.weight is Weight.BREAKAGE]


def refusals(outcome: Outcome, *, dependants: bool = True) -> list[str]:
    """Why a release can't be made, a line each; ``dependants``: ranges over a break count."""
    if outcome.status == COULD_NOT_CHECK:
        return [outcome.notice]
    failing = (one for one in outcome.findings if one.fails(strict=False))
    return [str(one) for one in failing if dependants or one.kind != "DEPENDANT_RANGE"]


def show(workspace: Workspace, name: str) -> Iterator[str]:
    """What would go into the next release of a package, in lines for people."""
    package = workspace[name]
    tag = last_tag(workspace.root, package.name, workspace.names)
    head = f"{package.name} {package.version}: "
    if tag is None:
        yield f"{head}no release tag yet"
    else:
        changed = shipped_changes(workspace, package, tag.name)
        what = f"{len(changed)} shipped files changed" if changed else "nothing shipped changed"
        yield f"{head}{what} since {tag.name}"
        yield from (f"  {file}" for file in changed)
    for file in fragments(package):
        yield f"  {FOLDER}/{file.name}: {file.read_text(encoding='utf-8').partition(chr(10))[0]}"


def shipped_changes(workspace: Workspace, package: Distribution, since: str) -> list[str]:
    """Files that go into the package and differ from a tag, relative to the repository."""
    folder = package.folder.relative_to(workspace.root).as_posix()
    shipped = [f"{folder}/{part}" for part in ("src", "pyproject.toml")]
    return changed_files(workspace.root, since, shipped)
