"""Lost tests: files that pytest does not collect, and suites with fewer tests than before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from monorepo.git_tags import GitError, git, merge_base, published_branch
from monorepo.workspace import PACKAGES_FOLDER

_TEST = r"^ *(async )?def test_|^class Test"
_FLOOR = re.compile(r"^tests = (\d+)$", re.MULTILINE)


def problems(root: Path, base: str | None) -> Iterator[str]:
    """Lost tests, a line each.

    ``[tool.monorepo] tests`` in a pyproject.toml is the fewest tests of its suite. A suite may also
    have no fewer tests than at the merge base with main or ``base``, unless the change sets
    another number.
    """
    branch = base or published_branch(root)
    since = None if branch is None else merge_base(root, branch)
    for settings, folders in _find_suites(root).items():
        yield from _find_uncollected(root, folders)
        text = (root / settings).read_text(encoding="utf-8")
        floor, count = _read_floor(text), _count_tests(root, folders, "--untracked")
        if count < floor:
            yield f"{settings} promises {floor} tests, and there are {count}"
        if since is None or not git(root, "ls-tree", since, "--", settings):
            continue
        # Another number in the settings is the statement that fewer tests are intended.
        before = _count_tests(root, folders, since)
        if count < before and floor == _read_floor(git(root, "show", f"{since}:{settings}")):
            yield (
                f"{settings}: {before} tests on {branch}, and now {count}. If no file was lost, "
                f"set [tool.monorepo] tests = {count}"
            )


def raise_floor(root: Path, settings: Path) -> str:
    """The text of a package's pyproject.toml with the number of its present tests as the floor."""
    folders = _find_suites(root)[settings.relative_to(root).as_posix()]
    count = _count_tests(root, folders, "--untracked")
    return _FLOOR.sub(
        lambda found: f"tests = {max(int(found[1]), count)}", settings.read_text(encoding="utf-8")
    )


def _find_suites(root: Path) -> dict[str, list[str]]:
    """The folders of each suite by its settings: packages, and all others together."""
    folders = [file.parent for file in sorted(root.glob(f"{PACKAGES_FOLDER}/*/pyproject.toml"))]
    packages = [folder.relative_to(root).as_posix() for folder in folders]
    return {
        **{f"{package}/pyproject.toml": [f"{package}/tests"] for package in packages},
        "pyproject.toml": ["tools/*/tests", "tests-integration"],
    }


def _find_uncollected(root: Path, folders: list[str]) -> Iterator[str]:
    for file in sorted(file for folder in folders for file in root.glob(f"{folder}/**/*")):
        if file.match("test_*.py") or file.suffix == ".pyc" or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if re.search(_TEST, text, re.MULTILINE):
            yield f"{file.relative_to(root)} has tests, but pytest collects only test_*.py"


def _read_floor(text: str) -> int:
    found = _FLOOR.search(text)
    return 0 if found is None else int(found[1])


def _count_tests(root: Path, folders: list[str], where: str) -> int:
    """The number of test functions and classes, at a revision or with ``--untracked`` files."""
    files = [f":(glob){folder}/**/test_*.py" for folder in folders]
    try:
        return len(git(root, "grep", "-hE", "-e", _TEST, where, "--", *files).splitlines())
    except GitError:  # git grep found none
        return 0
