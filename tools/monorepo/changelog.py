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


def list_fragments(package: Distribution) -> list[Path]:
    """The fragments of a package, sorted by name."""
    folder = package.folder / FOLDER
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in files if file.name != ".gitkeep"]


def find_section(text: str, version: Version) -> str | None:
    """The section of a released version in a changelog, or None if it has no dated heading."""
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
    if find_section(text, version) is not None:
        raise ChangelogError(f"the changelog has a section for {version} already")
    if not list_fragments(package):
        raise ChangelogError(f"nothing describes {version}: add {_WANTED}")
    head, heading, released = text.partition("\n## ")
    parts = (head.strip(), render_section(package, version, day), f"{heading}{released}".strip())
    return "\n\n".join(part for part in parts if part) + "\n"


def render_section(package: Distribution, version: Version, day: date) -> str:
    """The section that towncrier makes of the fragments of a package."""
    for file in list_fragments(package):
        if not file.is_file() or not file.read_text("utf-8").strip():
            raise ChangelogError(f"{FOLDER}/{file.name} is no file or empty; describe the change")
    command = [
        sys.executable, "-m", "towncrier", "build", "--draft", "--config", str(_SETTINGS),
        "--dir", str(package.folder), "--version", str(version), "--date", day.isoformat(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.rpartition("Error: ")[2].splitlines()
        raise ChangelogError(f"{' '.join(reason[:1])}; name it {_WANTED}")
    return done.stdout.strip()


def problems(workspace: Workspace, base: str | None) -> Iterator[str]:
    """Faults of the changelogs, a line each. With ``base``, changed sources need a fragment."""
    since = None if base is None else merge_base(workspace.root, base)
    for package in workspace.distributions.values():
        for problem in _describe_state(package):
            yield f"{package.name}: {problem}"
        if since is not None:
            for problem in _describe_change(package, workspace.root, since):
                yield f"{package.name}: {problem}"


def _describe_state(package: Distribution) -> Iterator[str]:
    file = package.folder / CHANGELOG
    if not file.is_file():
        yield f"there is no {CHANGELOG}"
        return
    text = file.read_text(encoding="utf-8")
    if "(unreleased)" in text:
        yield f"{CHANGELOG} lists released versions only; add {_WANTED}"
    if list_fragments(package):
        try:
            render_section(package, package.version, date.min)  # towncrier checks the names
        except ChangelogError as error:
            yield str(error)
    elif find_section(text, package.version) is None:
        version = f"{package.version} of {package.version_file.name}"
        yield f"nothing describes {version}: add {_WANTED}"


def _describe_change(package: Distribution, root: Path, since: str) -> Iterator[str]:
    """The faults of a change, unless it sets a version: then it has its section as well."""
    folder = package.folder.relative_to(root).as_posix()
    if changed_files(root, since, [package.version_file.relative_to(root).as_posix()]):
        return
    fragment = f"{folder}/{_WANTED}"
    touched = changed_files(root, since, [f"{folder}/{FOLDER}"])
    is_described = any((root / file).is_file() for file in touched)
    if changed_files(root, since, [f"{folder}/src"]) and not is_described:
        yield f"src changed and no fragment describes it: add {fragment}"
    if changed_files(root, since, [f"{folder}/{CHANGELOG}"]):
        yield f"{CHANGELOG} is written by releases: restore it and add {fragment}"
