"""Checks before a package is published."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.metadata import ExceptionGroup, InvalidMetadata, Metadata
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from api_check.findings import Finding, Weight
from api_check.outcome import COULD_NOT_CHECK, PASSED, Outcome, check_package
from monorepo.changelog import (
    CHANGELOG,
    FOLDER,
    ChangelogError,
    announces_a_break,
    fragments,
    section,
)
from monorepo.git_tags import changed_files, last_tag, parse_tag, release_tags
from monorepo.isolation.wheels import BuildError, build
from monorepo.ranges import misfits, sibling_requirements, spelled
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
    """Check a package before it is published; without ``archives`` it builds them."""
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


def build_archives(package: Distribution, folder: Path) -> None:
    """Build the sdist and the wheel of a package into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for target in ("sdist", "wheel"):
        built = build(package.folder, target, folder.resolve() / target)
        built.rename(folder / built.name)


def archive_problems(package: Distribution, folder: Path) -> Iterator[str]:
    """What is wrong with the archives in a folder, in a line each."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        yield f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists, not one of each"
    for file in wheels:
        yield from _wheel_problems(package, file)
    for file in sdists:
        yield from _sdist_problems(package, file)


def _wheel_problems(package: Distribution, file: Path) -> Iterator[str]:
    try:
        name, version, *_ = parse_wheel_filename(file.name)
    except InvalidWheelFilename as error:
        yield str(error)
        return
    if (name, version) != (package.name, package.version):
        yield f"{file.name} is not {package.name} {package.version}"
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        info = f"{file.name.rsplit('-', 3)[0]}.dist-info"
        if f"{info}/METADATA" not in names:
            yield f"{file.name} lacks {info}/METADATA"
            return
        yield from _metadata_problems(package, file, archive.read(f"{info}/METADATA"))
    module = package.module.replace(".", "/")
    for wanted in (f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"):
        if wanted not in names:
            yield f"{file.name} lacks {wanted}"
    for other in names:
        if not other.startswith((f"{module}/", f"{info}/")):
            yield f"{file.name} has {other}, which is not part of {package.module}"


def _sdist_problems(package: Distribution, file: Path) -> Iterator[str]:
    try:
        name, version = parse_sdist_filename(file.name)
    except InvalidSdistFilename as error:
        yield str(error)
        return
    if (name, version) != (package.name, package.version):
        yield f"{file.name} is not {package.name} {package.version}"
    with tarfile.open(file) as archive:
        info = f"{file.name.removesuffix('.tar.gz')}/PKG-INFO"
        member = archive.extractfile(info) if info in archive.getnames() else None
        content = None if member is None else member.read()
    if content is None:
        yield f"{file.name} lacks {info}"
        return
    yield from _metadata_problems(package, file, content)


def _metadata_problems(package: Distribution, file: Path, content: bytes) -> Iterator[str]:
    """Read the metadata as an index does, and compare it with the package's own files."""
    try:
        metadata = Metadata.from_email(content, validate=True)
    except (ExceptionGroup, InvalidMetadata) as error:
        yield f"{file.name} has metadata that an index refuses: {error}"
        return
    stated = (metadata.name, metadata.version)
    if stated != (package.name, package.version):
        yield f"{file.name} says that it is {stated[0]} {stated[1]}"
    declared = {str(one) for one in package.dependencies}
    plain = {
        str(one)
        for one in metadata.requires_dist or ()
        if one.marker is None or "extra" not in str(one.marker)
    }
    if plain != declared:
        yield f"{file.name} requires {sorted(plain)}, pyproject.toml {sorted(declared)}"
    if not BytesParser().parsebytes(content).get_payload():
        yield f"{file.name} carries no README"


def since_last_release(workspace: Workspace, package: str, version: Version) -> Outcome:
    """Compare the working tree with the last release below a version."""
    tag = last_tag(workspace.root, package, workspace.names, below=version)
    if tag is None:
        return Outcome(package, PASSED, f"no release before {version}, nothing to compare with")
    return check_package(workspace.root, package, baseline=tag.name, as_version=version)


def incompatible_changes(outcome: Outcome) -> list[str]:
    """The changes that users have to follow, a line each, covered by the version or not."""
    return _lines(one for one in outcome.findings if one.weight is Weight.BREAKAGE)


def refusals(outcome: Outcome, *, dependants: bool = True) -> list[str]:
    """Why a release can't be made, a line each; ``dependants``: ranges over a break count."""
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


SHIPPED = ("src", "pyproject.toml")


def show(workspace: Workspace, name: str) -> list[str]:
    """What would go into the next release of a package, in lines for people."""
    package = workspace[name]
    tag = last_tag(workspace.root, package.name, workspace.names)
    if tag is None:
        head = f"{package.name} {package.version}: no release tag yet"
        return [head, *_fragment_lines(package)]
    changed = shipped_changes(workspace, package, tag.name)
    what = f"{len(changed)} shipped files changed" if changed else "nothing shipped changed"
    head = f"{package.name} {package.version}: {what} since {tag.name}"
    return [head, *(f"  {file}" for file in changed), *_fragment_lines(package)]


def shipped_changes(workspace: Workspace, package: Distribution, since: str) -> list[str]:
    """Files that go into the package and differ from a tag, relative to the repository."""
    folder = package.folder.relative_to(workspace.root).as_posix()
    return changed_files(workspace.root, since, [f"{folder}/{part}" for part in SHIPPED])


def _fragment_lines(package: Distribution) -> list[str]:
    try:
        found = fragments(package)
    except ChangelogError as error:
        return [f"  {error}"]
    return [f"  {FOLDER}/{one.file.name}: {one.text.splitlines()[0]}" for one in found]
