"""What git knows of a release: its tags, the files changed since, and the files it had."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version


class GitError(RuntimeError):
    """git refused, or the folder is no repository."""


@dataclass(frozen=True)
class ReleaseTag:
    """A tag such as ``mcore-tensor-v0.1.0``."""

    package: str
    version: Version

    @property
    def name(self) -> str:
        """The text of the tag."""
        return f"{self.package}-v{self.version}"


def git(root: Path, *arguments: str) -> str:
    """The standard output of a git command.

    Raises:
        GitError: It failed; the text is what git said.
    """
    return _run(root, arguments).decode()


def parse_tag(text: str, packages: Collection[str]) -> ReleaseTag:
    """Split a tag into package and version; the longest package name that fits wins.

    Args:
        text: Such as ``mcore-tensor-v0.1.0``, with or without ``refs/tags/`` before it.
        packages: The names of all packages.

    Raises:
        ValueError: It begins with no package, or what follows ``-v`` is no version in its
            normal form.

    >>> parse_tag("refs/tags/mcore-tensor-v0.1.0", ["mcore", "mcore-tensor"])
    ReleaseTag(package='mcore-tensor', version=<Version('0.1.0')>)
    """
    tag = text.removeprefix("refs/tags/")
    fitting = [name for name in packages if tag.startswith(f"{name}-v")]
    if not fitting:
        known = ", ".join(sorted(packages))
        raise ValueError(f"tag {tag!r} has to be PACKAGE-vVERSION with one of: {known}")
    package = max(fitting, key=len)
    written = tag[len(package) + 2 :]
    try:
        version = Version(written)
    except InvalidVersion:
        version = None
    if version is None or str(version) != written:
        raise ValueError(f"tag {tag!r}: {written!r} is no version such as 0.1.0 or 1.0.0rc1")
    return ReleaseTag(package, version)


def release_tags(root: Path, package: str, packages: Collection[str]) -> list[ReleaseTag]:
    """The tags of a package that are part of the history of HEAD, lowest version first."""
    listed = git(root, "tag", "--list", f"{package}-v*", "--merged", "HEAD").split()
    found = []
    for text in listed:
        try:
            tag = parse_tag(text, packages)
        except ValueError:
            continue
        if tag.package == package:
            found.append(tag)
    return sorted(found, key=lambda tag: tag.version)


def last_tag(
    root: Path,
    package: str,
    packages: Collection[str],
    *,
    up_to: Version | None = None,
    below: Version | None = None,
) -> ReleaseTag | None:
    """The highest tag of a package in the history of HEAD, None before its first release.

    Args:
        root: The repository.
        package: Whose tag.
        packages: The names of all packages.
        up_to: Leave out tags of newer versions than this.
        below: Leave out tags of this version and newer ones.
    """
    fitting = [
        tag
        for tag in release_tags(root, package, packages)
        if (up_to is None or tag.version <= up_to) and (below is None or tag.version < below)
    ]
    return fitting[-1] if fitting else None


def changed_files(root: Path, since: str, folders: Sequence[str]) -> list[str]:
    """Files below some folders that differ between a revision and the working tree.

    Untracked files count, ignored ones do not; a rename counts with both of its names.

    Args:
        root: The repository.
        since: The revision.
        folders: Paths relative to the root.
    """
    tracked = git(root, "diff", "--name-only", "--no-renames", "-z", since, "--", *folders)
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *folders)
    return sorted({*tracked.split("\0"), *new.split("\0")} - {""})


def merge_base(root: Path, base: str) -> str:
    """The last common commit of a revision and HEAD.

    Raises:
        GitError: The revision is unknown or shares no history.
    """
    return git(root, "merge-base", base, "HEAD").strip()


def commit_exists(root: Path, revision: str) -> bool:
    """Whether a revision names a commit."""
    try:
        git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except GitError:
        return False
    return True


def export_tree(root: Path, revision: str, target: Path, *folders: str) -> None:
    """Write the files of a revision into a folder; the repository itself is only read.

    Raises:
        GitError: The revision is unknown or has no such folder.
    """
    packed = _run(root, ["archive", "--format=tar", revision, *folders])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")


def _run(root: Path, arguments: Sequence[str]) -> bytes:
    try:
        finished = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except OSError as error:
        raise GitError(f"git could not be started: {error}") from error
    if finished.returncode:
        said = finished.stderr.decode().strip() or f"exit status {finished.returncode}"
        raise GitError(f"git {arguments[0]} in {root}: {said}")
    return finished.stdout
