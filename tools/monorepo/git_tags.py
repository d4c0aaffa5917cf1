"""Release tags, changed files and old files, read from git."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version


class GitError(RuntimeError):
    """A git command failed, or the folder is not a repository."""


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
    """The standard output of a git command."""
    return _run(root, arguments).decode()


def parse_tag(text: str, packages: Collection[str]) -> ReleaseTag:
    """Split a tag such as ``mcore-tensor-v0.1.0``."""
    tag = text.removeprefix("refs/tags/")
    package, _, written = tag.rpartition("-v")
    if package not in packages:
        known = ", ".join(sorted(packages))
        raise ValueError(f"tag {tag!r} has to be PACKAGE-vVERSION with one of: {known}")
    try:
        version = Version(written)
    except InvalidVersion:
        version = None
    # Only the canonical form: two spellings would be two tags of one version.
    if version is None or str(version) != written:
        raise ValueError(f"tag {tag!r}: {written!r} is not a version such as 0.1.0 or 1.0.0rc1")
    return ReleaseTag(package, version)


def release_tags(root: Path, package: str, packages: Collection[str]) -> list[ReleaseTag]:
    """The tags of a package in the history of HEAD, lowest version first."""
    found = []
    for text in git(root, "tag", "--list", f"{package}-v*", "--merged", "HEAD").split():
        try:
            tag = parse_tag(text, packages)
        except ValueError:
            continue
        if tag.package == package:
            found.append(tag)
    return sorted(found, key=lambda tag: tag.version)


def last_tag(
    root: Path, package: str, packages: Collection[str], *, up_to: Version | None = None,
    below: Version | None = None,
) -> ReleaseTag | None:  # fmt: skip
    """The highest tag of a package in HEAD's history, up to or below a version, or None."""
    fitting = [
        tag
        for tag in release_tags(root, package, packages)
        if (up_to is None or tag.version <= up_to) and (below is None or tag.version < below)
    ]
    return fitting[-1] if fitting else None


def changed_files(root: Path, since: str, folders: Sequence[str]) -> list[str]:
    """Files below some folders that differ between a revision and the working tree.

    Untracked files count, ignored files do not. A rename counts with both of its names.
    """
    tracked = git(root, "diff", "--name-only", "--no-renames", "-z", since, "--", *folders)
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *folders)
    return sorted({*tracked.split("\0"), *new.split("\0")} - {""})


def merge_base(root: Path, base: str) -> str:
    """The last common commit of a revision and HEAD."""
    return git(root, "merge-base", base, "HEAD").strip()


def commit_exists(root: Path, revision: str) -> bool:
    """Whether a revision names a commit."""
    return _succeeds(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")


def published_branch(root: Path) -> str | None:
    """The branch of the releases: main as it was pushed, else the local main, else None."""
    # The local main may have commits that nobody has merged.
    names = ("origin/main", "main")
    return next((name for name in names if commit_exists(root, name)), None)


def is_in(root: Path, revision: str, branch: str) -> bool:
    """Whether a commit is part of the history of a branch."""
    return _succeeds(root, "merge-base", "--is-ancestor", revision, branch)


def export_tree(root: Path, revision: str, target: Path, *folders: str) -> None:
    """Write the files of a revision into a folder. The repository is only read."""
    packed = _run(root, ["archive", "--format=tar", revision, *folders])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")


def _succeeds(root: Path, *arguments: str) -> bool:
    try:
        _run(root, arguments)
    except GitError:
        return False
    return True


def _run(root: Path, arguments: Sequence[str]) -> bytes:
    try:
        finished = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except OSError as error:
        raise GitError(f"git could not be started: {error}") from error
    if finished.returncode:
        reason = finished.stderr.decode().strip() or f"exit status {finished.returncode}"
        raise GitError(f"git {arguments[0]} in {root}: {reason}")
    return finished.stdout
