"""Changelogs: a fragment per change, folded into the package's CHANGELOG.md by a release."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from packaging.version import Version

from monorepo.git_tags import GitError, changed_files, commit_exists, merge_base
from monorepo.workspace import REPOSITORY, Distribution, Workspace, load_workspace

FOLDER = "changelog.d"
CHANGELOG = "CHANGELOG.md"
KINDS = ("added", "changed", "deprecated", "removed", "fixed")
ANNOUNCING_A_BREAK = frozenset({"changed", "removed"})
_IN_THE_MAKING = re.compile(r"## (?:Unreleased|\S+ \(unreleased\))[ \t]*$", re.MULTILINE)
_NAME = re.compile(r"(?P<slug>[a-z0-9][a-z0-9-]*)\.(?P<kind>[a-z]+)\.md")


class ChangelogError(ValueError):
    """A fragment or a changelog is malformed."""


@dataclass(frozen=True)
class Fragment:
    """One change in a file of its own."""

    file: Path
    kind: str
    text: str


def fragments(package: Distribution) -> list[Fragment]:
    """Read the fragments of a package, sorted by name."""
    folder = package.folder / FOLDER
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_read(file) for file in files if file.name != ".gitkeep"]


def section(text: str, version: Version) -> str | None:
    """What a changelog says about a released version; None where it has no dated heading."""
    dated = re.search(
        rf"^## {re.escape(str(version))} \(\d{{4}}-\d\d-\d\d\)[ \t]*\n", text, re.MULTILINE
    )
    return None if dated is None else text[dated.end() :].split("\n## ")[0].strip()


def announces_a_break(text: str) -> bool:
    """Whether a section has entries under "Changed" or "Removed"."""
    return any(f"### {kind.capitalize()}" in text for kind in ANNOUNCING_A_BREAK)


def heading_versions(text: str) -> list[str]:
    """The versions that have a ``## X.Y.Z (date)`` heading, from the top."""
    return re.findall(r"^## (\d\S*)(?: \(.*\))?\s*$", text, re.MULTILINE)


def fold(text: str, version: Version, day: date, found: Iterable[Fragment]) -> str:
    """The changelog with a section for a version, from fragments and what stood unreleased."""
    before, unreleased, after = _split(text)
    if str(version) in heading_versions(before + after):
        raise ChangelogError(f"the changelog has a section for {version} already")
    groups = [
        f"### {kind.capitalize()}\n\n{entries}"
        for kind in KINDS
        if (entries := "\n".join(_entry(one.text) for one in found if one.kind == kind))
    ]
    body = "\n\n".join(part for part in (_merged(unreleased, groups)) if part)
    if not body:
        raise ChangelogError(f"nothing describes {version}: add a fragment to {FOLDER}/")
    heading = f"## {version} ({day.isoformat()})"
    parts = (before.strip(), heading, body, after.strip())
    return "\n\n".join(part for part in parts if part) + "\n"


def problems(workspace: Workspace, base: str | None) -> list[str]:
    """What is wrong with the changelogs, a line each; ``base`` also asks for new fragments."""
    since = None if base is None else merge_base(workspace.root, base)
    found: list[str] = []
    for package in workspace.distributions.values():
        try:
            fragments(package)
        except ChangelogError as error:
            found.append(f"{package.name}: {error}")
        found.extend(_heading_problems(package))
        if since is not None:
            found.extend(_problems_since(package, workspace.root, since))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the changelogs of all packages; print what is missing and return 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m monorepo.changelog", description=__doc__)
    parser.add_argument(
        "--base",
        metavar="REF",
        help="demand a fragment of every package whose src changed since the merge base with REF",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    workspace = load_workspace(options.root)
    if options.base is not None and not commit_exists(workspace.root, options.base):
        print(f"{options.base!r} is not a revision of this repository", file=sys.stderr)
        return 2
    try:
        found = problems(workspace, options.base)
    except GitError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(found) or f"the changelogs of {len(workspace.names)} packages are in order")
    return 1 if found else 0


def _read(file: Path) -> Fragment:
    fitting = _NAME.fullmatch(file.name)
    if fitting is None or fitting["kind"] not in KINDS:
        shown = f"{FOLDER}/{file.name}"
        raise ChangelogError(
            f"{shown} has to be named SLUG.KIND.md with KIND of {', '.join(KINDS)}"
        )
    text = file.read_text(encoding="utf-8").strip()
    if not text:
        raise ChangelogError(f"{FOLDER}/{file.name} is empty; say what changed for users")
    return Fragment(file, fitting["kind"], text)


def _entry(text: str) -> str:
    """A fragment as one item of a list."""
    first, *rest = text.removeprefix("- ").splitlines()
    return "\n".join([f"- {first}", *(f"  {line.strip()}".rstrip() for line in rest)])


def _split(text: str) -> tuple[str, str, str]:
    """What stands above the sections, what is unreleased, and the released sections."""
    starts = [match.start() for match in re.finditer(r"^## ", text, re.MULTILINE)]
    first = starts[0] if starts else len(text)
    making = _IN_THE_MAKING.match(text, first)
    if making is None:
        return text[:first], "", text[first:]
    second = starts[1] if len(starts) > 1 else len(text)
    return text[:first], text[making.end() : second].strip(), text[second:]


def _merged(unreleased: str, groups: Sequence[str]) -> list[str]:
    """Unreleased text first, with the entries of a group under the heading that it has there."""
    merged = unreleased
    left: list[str] = []
    for group in groups:
        heading, _, entries = group.partition("\n\n")
        if f"{heading}\n" not in f"{merged}\n":
            left.append(group)
            continue
        start = merged.index(heading)
        end = merged.find("\n### ", start)
        end = len(merged) if end < 0 else end
        merged = f"{merged[:end].rstrip()}\n{entries}\n{merged[end:]}".rstrip()
    return [merged, *left]


def _heading_problems(package: Distribution) -> Iterable[str]:
    file = package.folder / CHANGELOG
    if not file.is_file():
        return [f"{package.name}: there is no {CHANGELOG}"]
    if str(package.version) in heading_versions(file.read_text(encoding="utf-8")):
        return []
    return [
        f"{package.name}: {CHANGELOG} has no heading '## {package.version} (YYYY-MM-DD)' for the "
        f"version in {package.version_file.name}; before the first release write (unreleased)"
    ]


def _problems_since(package: Distribution, root: Path, since: str) -> Iterable[str]:
    """What a change lacks, unless it sets a version, which comes with a section of its own."""
    folder = package.folder.relative_to(root).as_posix()
    if changed_files(root, since, [package.version_file.relative_to(root).as_posix()]):
        return
    fragment = f"{folder}/{FOLDER}/SLUG.KIND.md with KIND of {', '.join(KINDS)}"
    touched = changed_files(root, since, [f"{folder}/{FOLDER}"])
    told = any((root / file).is_file() for file in touched)
    if changed_files(root, since, [f"{folder}/src"]) and not told:
        yield f"{package.name}: src changed and no fragment says how: add {fragment}"
    if changed_files(root, since, [f"{folder}/{CHANGELOG}"]):
        yield f"{package.name}: {CHANGELOG} is written by releases: take it back and add {fragment}"


if __name__ == "__main__":
    sys.exit(main())
