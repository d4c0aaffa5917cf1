"""Changelogs: a fragment per change, which towncrier folds into CHANGELOG.md at a release."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from packaging.version import Version

from monorepo.git_tags import changed_files, merge_base
from monorepo.workspace import Distribution, Workspace, read_toml

FOLDER = "changelog.d"
CHANGELOG = "CHANGELOG.md"
_SETTINGS = Path(__file__).with_name("towncrier.toml")
KINDS = tuple(kind["directory"] for kind in read_toml(_SETTINGS)["tool"]["towncrier"]["type"])
_WANTED = f"{FOLDER}/SLUG.KIND.md with KIND of {', '.join(KINDS)}"


class ChangelogError(ValueError):
    """A fragment or a changelog is malformed."""


def fragments(package: Distribution) -> list[Path]:
    """The fragments of a package, sorted by name."""
    folder = package.folder / FOLDER
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in files if file.name != ".gitkeep"]


def section(text: str, version: Version) -> str | None:
    """What a changelog says about a released version; None where it has no dated heading."""
    dated = re.search(
        rf"^## {re.escape(str(version))} \(\d{{4}}-\d\d-\d\d\)[ \t]*\n", text, re.MULTILINE
    )
    return None if dated is None else text[dated.end() :].split("\n## ")[0].strip()


def announces_a_break(text: str) -> bool:
    """Whether a section has entries under "Changed" or "Removed"."""
    return "### Changed" in text or "### Removed" in text


def fold(package: Distribution, version: Version, day: date) -> str:
    """The changelog of a package with a section for a version, rendered from its fragments."""
    text = (package.folder / CHANGELOG).read_text(encoding="utf-8")
    if section(text, version) is not None:
        raise ChangelogError(f"the changelog has a section for {version} already")
    if not fragments(package):
        raise ChangelogError(f"nothing describes {version}: add {_WANTED}")
    head, heading, released = text.partition("\n## ")
    parts = (head.strip(), rendered(package, version, day), f"{heading}{released}".strip())
    return "\n\n".join(part for part in parts if part) + "\n"


def rendered(package: Distribution, version: Version, day: date) -> str:
    """The section that towncrier makes of the fragments of a package."""
    for file in fragments(package):
        if not file.is_file() or not file.read_text("utf-8").strip():
            raise ChangelogError(f"{FOLDER}/{file.name} is no file or empty; say what changed")
    command = [
        sys.executable, "-m", "towncrier", "build", "--draft", "--config", str(_SETTINGS),
        "--dir", str(package.folder), "--version", str(version), "--date", day.isoformat(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.rpartition("Error: ")[2].splitlines()
        raise ChangelogError(f"{' '.join(said[:1])}; name it {_WANTED}")
    return done.stdout.strip()


def problems(workspace: Workspace, base: str | None) -> Iterator[str]:
    """What is wrong with the changelogs, a line each; ``base`` also asks for new fragments."""
    since = None if base is None else merge_base(workspace.root, base)
    for package in workspace.distributions.values():
        yield from _own_problems(package)
        if since is not None:
            yield from _problems_since(package, workspace.root, since)


def _own_problems(package: Distribution) -> Iterator[str]:
    file = package.folder / CHANGELOG
    if not file.is_file():
        yield f"{package.name}: there is no {CHANGELOG}"
        return
    text = file.read_text(encoding="utf-8")
    if "(unreleased)" in text:
        yield f"{package.name}: {CHANGELOG} has only what is released; add {_WANTED}"
    if fragments(package):
        try:
            rendered(package, package.version, date.min)
        except ChangelogError as error:
            yield f"{package.name}: {error}"
    elif section(text, package.version) is None:
        yield (
            f"{package.name}: nothing describes {package.version} of {package.version_file.name}: "
            f"add {_WANTED}"
        )


def _problems_since(package: Distribution, root: Path, since: str) -> Iterator[str]:
    """What a change lacks, unless it sets a version, which comes with a section of its own."""
    folder = package.folder.relative_to(root).as_posix()
    if changed_files(root, since, [package.version_file.relative_to(root).as_posix()]):
        return
    fragment = f"{folder}/{_WANTED}"
    touched = changed_files(root, since, [f"{folder}/{FOLDER}"])
    told = any((root / file).is_file() for file in touched)
    if changed_files(root, since, [f"{folder}/src"]) and not told:
        yield f"{package.name}: src changed and no fragment says how: add {fragment}"
    if changed_files(root, since, [f"{folder}/{CHANGELOG}"]):
        yield f"{package.name}: {CHANGELOG} is written by releases: take it back and add {fragment}"
