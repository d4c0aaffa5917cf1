"""Checks of the sources and the archives of a package before it is published."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from packaging.version import Version

from api_check.compare import Weight
from api_check.outcome import COULD_NOT_CHECK, PASSED, Outcome, check_package
from monorepo import changelog, git_tags
from monorepo.changelog import CHANGELOG, FOLDER
from monorepo.git_tags import commit_exists, is_in, last_tag, release_tags
from monorepo.isolation.venv import build
from monorepo.ranges import find_misfits, format_requirement, sibling_requirements
from monorepo.workspace import Distribution, Workspace, read_toml


@dataclass(frozen=True)
class Verification:
    """The result of the checks before a release.

    Attributes:
        refused: The reasons against publishing, a line each. Empty if it may be published.
        notes: Checks that were not possible, and steps left before the tag.
    """

    refused: tuple[str, ...]
    notes: tuple[str, ...]


def verify_release(workspace: Workspace, name: str, *, tag: str | None = None) -> Verification:
    """Check the sources of a package before it is published, and the tag if one is given."""
    package = workspace[name]
    notes = []
    if not any(release_tags(workspace.root, each, workspace.names) for each in workspace.names):
        notes.append("there are no release tags: nothing earlier to compare with")
    refused = [
        *_check_version(workspace, package, tag),
        *find_misfits(workspace),
        *_check_changelog(workspace, package),
    ]
    open_ends = [*_list_open_ends(workspace, package)]
    if tag is None:
        notes += [f"before its tag: {one}" for one in open_ends]
    else:
        refused = [*_check_tag(workspace, package, tag), *refused, *open_ends]
    return Verification(tuple(refused), tuple(notes))


def _check_tag(workspace: Workspace, package: Distribution, text: str) -> Iterator[str]:
    """Check that a tag fits the package, at HEAD, on the released branch."""
    root = workspace.root
    try:
        tag = git_tags.parse_tag(text, workspace.names)
    except ValueError as error:
        yield str(error)
        return
    if tag.package != package.name:
        yield f"{tag.name} is a tag of {tag.package}, not of {package.name}"
    elif tag.version != package.version:
        yield f"{tag.name} is tagged, but {package.version_file.name} has {package.version}"
    main = git_tags.published_branch(root)
    if main is None:
        yield "there is no branch main to look for the tag in: git fetch origin main"
    elif not is_in(root, "HEAD", main):
        yield f"HEAD is no commit of {main}: merge it first"
    # An annotated tag has another hash than its commit: ancestry both ways is equality.
    at = f"refs/tags/{tag.name}"
    if commit_exists(root, at) and not (is_in(root, at, "HEAD") and is_in(root, "HEAD", at)):
        yield (
            f"{tag.name} is set at another commit than HEAD: check it out, or "
            f"git tag --delete {tag.name}"
        )


def _check_version(workspace: Workspace, package: Distribution, tag: str | None) -> Iterator[str]:
    last = last_tag(workspace.root, package.name, workspace.names)
    if last is None:
        return
    if last.version > package.version:
        yield f"{package.name} {package.version} is older than its last release, {last.name}"
    elif last.version == package.version:
        changed = shipped_changes(workspace, package, last.name)
        if changed:
            yield (
                f"{package.name} changed since {last.name} and still has version "
                f"{package.version}: {', '.join(changed)}"
            )
        elif tag is None:
            yield f"{package.name} {package.version} is released already and did not change"


def _check_changelog(workspace: Workspace, package: Distribution) -> Iterator[str]:
    text = (package.folder / CHANGELOG).read_text(encoding="utf-8")
    section = changelog.find_section(text, package.version) or ""
    if changelog.list_fragments(package):
        try:
            # Only the kinds of entries matter here, not the day.
            section += changelog.render_section(package, package.version, date.min)
        except changelog.ChangelogError as error:
            yield f"{package.name}: {error}"
    elif not section:
        yield f"{CHANGELOG} of {package.name} has no '## {package.version} (YYYY-MM-DD)'"
    outcome = compare_with_last_release(workspace, package.name, package.version)
    yield from list_refusals(outcome)
    breaks = list_breaks(outcome)
    if breaks and not changelog.announces_a_break(section):
        yield f"{breaks[0]}, and {CHANGELOG} has nothing under Changed or Removed"


def _list_open_ends(workspace: Workspace, package: Distribution) -> Iterator[str]:
    """Steps left before a tag: fragments, siblings without a release, placeholder links."""
    if left := changelog.list_fragments(package):
        yield f"{package.name} still has {FOLDER}/{left[0].name}: run release prepare"
    for requirement, sibling in sibling_requirements(package, workspace):
        released = release_tags(workspace.root, sibling.name, workspace.names)
        if not any(requirement.specifier.contains(one.version, True) for one in released):
            shown = format_requirement(requirement)
            yield f"{package.name} requires {shown}; release {sibling.name} first"
    urls = read_toml(package.folder / "pyproject.toml")["project"].get("urls", {})
    # The sources have links to a reserved domain until the repository has an address.
    if not urls or any(urlsplit(url).netloc.endswith(".example") for url in urls.values()):
        yield f"[project.urls] of {package.name} have to name the repository, with CITATION.cff"


def verify_archives(package: Distribution, archives: Path | None) -> list[str]:
    """Faults of the archives in a folder, a line each. Without a folder they are built here."""
    if archives is not None:
        return list(archive_problems(package, archives))
    with TemporaryDirectory(prefix="release-") as folder:
        build(package.folder, Path(folder))
        return list(archive_problems(package, Path(folder)))


def archive_problems(package: Distribution, folder: Path) -> Iterator[str]:
    """Faults of the sdist and the wheel of a package in a folder, a line each."""
    stem = f"{package.name.replace('-', '_')}-"
    wheel = folder / f"{stem}{package.version}-py3-none-any.whl"
    sdist = folder / f"{stem}{package.version}.tar.gz"
    found = sorted(folder.glob(f"{stem}*"))
    if found != [wheel, sdist]:
        names = [file.name for file in found]
        yield f"{folder} has {names}, and has to have {wheel.name} and {sdist.name}"
        return
    yield from run_tool("twine", "check", "--strict", wheel, sdist)
    yield from run_tool("check_wheel_contents", "--no-config", "--src-dir", package.source, wheel)
    yield from _check_wheel(package, wheel)


def run_tool(tool: str, *arguments: object) -> Iterator[str]:
    """Run a Python tool. Yields its output if it fails."""
    command = [sys.executable, "-m", tool, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{tool}: {' '.join((done.stdout + done.stderr).split())}"


def _check_wheel(package: Distribution, file: Path) -> Iterator[str]:
    """Yield missing files of a wheel, and files of other packages."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    info = f"{file.name.removesuffix('-py3-none-any.whl')}.dist-info"
    folder = f"{package.module.replace('.', '/')}/"
    for wanted in (f"{folder}py.typed", f"{info}/licenses/LICENSE"):
        if wanted not in names:
            yield f"{file.name} lacks {wanted}"
    for other in names:
        if not other.startswith((folder, f"{info}/")):
            yield f"{file.name} has {other}, which is not part of {package.module}"


def compare_with_last_release(workspace: Workspace, package: str, version: Version) -> Outcome:
    """Compare the working tree with the last release below a version."""
    tag = last_tag(workspace.root, package, workspace.names, below=version)
    if tag is None:
        return Outcome(package, PASSED, f"no release before {version}, nothing to compare with")
    return check_package(workspace.root, package, baseline=tag.name, as_version=version)


def list_breaks(outcome: Outcome) -> list[str]:
    """The changes that break users, a line each, announced by the version or not."""
    return [str(one) for one in outcome.findings if one.weight is Weight.BREAKAGE]


def list_refusals(outcome: Outcome, *, dependants: bool = True) -> list[str]:
    """The reasons against a release, a line each, with ranges of ``dependants`` over a break."""
    if outcome.status == COULD_NOT_CHECK:
        return [outcome.notice]
    failing = (one for one in outcome.findings if one.fails)
    return [str(one) for one in failing if dependants or one.kind != "DEPENDANT_RANGE"]


def show(workspace: Workspace, name: str) -> Iterator[str]:
    """The contents of the next release of a package, in lines for people."""
    package = workspace[name]
    tag = last_tag(workspace.root, package.name, workspace.names)
    head = f"{package.name} {package.version}: "
    if tag is None:
        yield f"{head}no release tag yet"
    else:
        changed = shipped_changes(workspace, package, tag.name)
        count = f"{len(changed)} shipped files changed" if changed else "nothing shipped changed"
        yield f"{head}{count} since {tag.name}"
        yield from (f"  {file}" for file in changed)
    for file in changelog.list_fragments(package):
        yield f"  {FOLDER}/{file.name}: {file.read_text(encoding='utf-8').partition(chr(10))[0]}"


def shipped_changes(workspace: Workspace, package: Distribution, since: str) -> list[str]:
    """Files of the archives that differ from a tag, relative to the repository."""
    folder = package.folder.relative_to(workspace.root).as_posix()
    shipped = [f"{folder}/{part}" for part in ("src", "pyproject.toml")]
    return git_tags.changed_files(workspace.root, since, shipped)
