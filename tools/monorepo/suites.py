"""Tests that would go unnoticed: files that pytest skips, and packages with fewer than before."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from monorepo.git_tags import GitError, git, merge_base
from monorepo.workspace import REPOSITORY, Distribution, Workspace, load_workspace, read_toml

_TEST = re.compile(r"^ *(?:async )?def test_|^class Test", re.MULTILINE)
_FLOOR = re.compile(r"^tests = (\d+)$", re.MULTILINE)
_FOLDERS = ("packages/*/tests", "tools/*/tests", "tests-integration")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tests that are lost; return 1 if there are any, 2 for a base that git lacks."""
    parser = argparse.ArgumentParser(prog="python -m monorepo.suites", description=__doc__)
    parser.add_argument("--base", metavar="REF", help="no floor may be lower than there")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    workspace = load_workspace(options.root)
    try:
        lowered = [] if options.base is None else list(lowered_floors(workspace, options.base))
    except GitError as error:
        print(error, file=sys.stderr)
        return 2
    found = [*skipped_files(workspace.root), *lost_tests(workspace), *lowered]
    print("\n".join(found) or "no test file is skipped, no package has fewer tests than its floor")
    return 1 if found else 0


def skipped_files(root: Path) -> Iterator[str]:
    """Files with tests whose names pytest does not look at."""
    for file in sorted(file for folder in _FOLDERS for file in root.glob(f"{folder}/**/*.py")):
        if not file.name.startswith("test_") and number_of_tests(file):
            yield f"{file.relative_to(root)} has tests, and pytest collects test_*.py only"


def lost_tests(workspace: Workspace) -> Iterator[str]:
    """Packages with fewer tests than they once had."""
    for package in workspace.distributions.values():
        floor, count = stated_floor(package), tests_of(package)
        if count < floor:
            yield (
                f"{package.name} has {count} tests, and {floor} is the floor in its pyproject.toml "
                "([tool.monorepo] tests): was a file of tests deleted?"
            )


def lowered_floors(workspace: Workspace, base: str) -> Iterator[str]:
    """Packages whose floor is lower than where a change began."""
    since = merge_base(workspace.root, base)
    for package in workspace.distributions.values():
        file = (package.folder / "pyproject.toml").relative_to(workspace.root).as_posix()
        if not git(workspace.root, "ls-tree", since, "--", file):
            continue
        before = _FLOOR.search(git(workspace.root, "show", f"{since}:{file}"))
        now = stated_floor(package)
        if before is not None and now < int(before[1]):
            yield f"{package.name}: the floor of its tests fell from {before[1]} to {now}"


def stated_floor(package: Distribution) -> int:
    """The fewest tests that a package may have, as its pyproject.toml says; 0 where it does not."""
    tool = read_toml(package.folder / "pyproject.toml")["tool"]
    return int(tool.get("monorepo", {}).get("tests", 0))


def with_raised_floor(package: Distribution, text: str) -> str:
    """The text of a package's pyproject.toml with all its present tests as the floor."""
    return _FLOOR.sub(lambda found: f"tests = {max(int(found[1]), tests_of(package))}", text)


def tests_of(package: Distribution) -> int:
    """The number of test functions and classes that pytest would collect from a package."""
    return sum(map(number_of_tests, (package.folder / "tests").glob("**/test_*.py")))


def number_of_tests(file: Path) -> int:
    """The number of test functions and classes in a file."""
    return len(_TEST.findall(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
