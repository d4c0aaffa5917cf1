"""Tests that would go unnoticed: files that pytest skips, and suites with fewer than before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from monorepo.git_tags import GitError, git, merge_base, published_branch
from monorepo.workspace import PACKAGES_FOLDER

_TEST = r"^ *(async )?def test_|^class Test"
_FLOOR = re.compile(r"^tests = (\d+)$", re.MULTILINE)


class Suite(NamedTuple):
    """Tests with a common floor: those of a package, or all others.

    Attributes:
        settings: The ``pyproject.toml`` that states the floor (``[tool.monorepo] tests``).
        folders: Patterns of the folders that hold them.
    """

    settings: str
    folders: tuple[str, ...]


def problems(root: Path, base: str | None) -> Iterator[str]:
    """Tests that are lost, in a line each; with a ``base`` no floor may be lower than there."""
    yield from skipped_files(root)
    yield from lost_tests(root, base)


def suites(root: Path) -> Iterator[Suite]:
    """The suite of each package, and that of the tools with the tests across packages."""
    for file in sorted(root.glob(f"{PACKAGES_FOLDER}/*/pyproject.toml")):
        folder = file.parent.relative_to(root).as_posix()
        yield Suite(f"{folder}/pyproject.toml", (f"{folder}/tests",))
    yield Suite("pyproject.toml", ("tools/*/tests", "tests-integration"))


def skipped_files(root: Path) -> Iterator[str]:
    """Files with tests whose names pytest does not look at."""
    folders = [folder for suite in suites(root) for folder in suite.folders]
    for file in sorted(file for folder in folders for file in root.glob(f"{folder}/**/*")):
        named = file.match("test_*.py") or file.suffix == ".pyc" or not file.is_file()
        text = "" if named else file.read_text(encoding="utf-8", errors="replace")
        if re.search(_TEST, text, re.MULTILINE):
            yield f"{file.relative_to(root)} has tests, and pytest collects test_*.py only"


def lost_tests(root: Path, base: str | None) -> Iterator[str]:
    """Suites with fewer tests than their floor, or than where the work left main.

    A change that means to have fewer writes its own floor. With a ``base``, no floor may fall.
    """
    branch = base or published_branch(root)
    since = None if branch is None else merge_base(root, branch)
    for suite in suites(root):
        text = (root / suite.settings).read_text(encoding="utf-8")
        floor, count = _floor(text), _tests(root, suite)
        if count < floor:
            yield f"{suite.settings} promises {floor} tests, and there are {count}"
        if since is None or not git(root, "ls-tree", since, "--", suite.settings):
            continue
        before = _floor(git(root, "show", f"{since}:{suite.settings}"))
        if base is not None and floor < before:
            yield f"{suite.settings}: the floor of its tests fell from {before} to {floor}"
        there = _tests(root, suite, since)
        if floor == before and count < there:
            yield (
                f"{suite.settings}: {there} tests on {branch}, and now {count}: was a file lost? "
                f"If fewer are meant, set [tool.monorepo] tests = {count}"
            )


def with_raised_floor(root: Path, settings: Path) -> str:
    """The text of a package's pyproject.toml with all its present tests as the floor."""
    [suite] = (one for one in suites(root) if root / one.settings == settings)
    count = _tests(root, suite)
    return _FLOOR.sub(
        lambda found: f"tests = {max(int(found[1]), count)}", settings.read_text(encoding="utf-8")
    )


def _floor(text: str) -> int:
    """The fewest tests that a suite may have; 0 where its settings do not say."""
    found = _FLOOR.search(text)
    return 0 if found is None else int(found[1])


def _tests(root: Path, suite: Suite, revision: str | None = None) -> int:
    """The number of test functions and classes that pytest would collect, now or at a revision."""
    where = "--untracked" if revision is None else revision
    files = [f":(glob){folder}/**/test_*.py" for folder in suite.folders]
    try:
        return len(git(root, "grep", "-hE", "-e", _TEST, where, "--", *files).splitlines())
    except GitError:  # there are none
        return 0
