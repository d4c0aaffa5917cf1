"""Command line: ``python -m monorepo.plan [--base REF | --release TAG | --oldest]``.

Prints the test matrix of a change as one line of JSON, or the packages that a release concerns.
Needs Python >= 3.11 and ``packaging`` only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import Version

from monorepo.git_tags import GitError, changed_files, merge_base, parse_tag
from monorepo.workspace import (
    PACKAGES_FOLDER,
    REPOSITORY,
    Cell,
    Distribution,
    Workspace,
    load_workspace,
    read_cells,
)

_INTEGRATION_FOLDER = "tests-integration"
_DOCS_FOLDERS = (".", ".github")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, and the reason for it on the error stream. Returns 1 if it cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.plan", description="Print the test matrix of a change."
    )
    parser.add_argument(
        "--base", default="", metavar="REF", help="revision to compare with; default: test all"
    )
    parser.add_argument("--release", metavar="TAG", help="a release tag or a package")
    parser.add_argument(
        "--oldest", action="store_true", help="print the hatch environment with the oldest torch"
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    workspace = load_workspace(options.root)
    cells = read_cells(workspace.root)
    if options.release:
        return _print_release(workspace, options.release)
    if options.oldest:
        # On a Python in the middle, which has all libraries of the tools.
        pythons = sorted({cell.python for cell in cells}, key=Version)
        oldest = min((cell.torch for cell in cells), key=Version)
        print(f"matrix.py{pythons[len(pythons) // 2]}-{oldest}")
        return 0
    made = make_plan(workspace, cells, find_change(workspace, options.base))
    print(made["reason"], file=sys.stderr)
    tested = {job["package"] for job in made["include"]}
    if left_out := [name for name in made["packages"] if name not in tested]:
        print(
            f"no cell that {', '.join(left_out)} can be installed in: "
            f"add one to [envs.matrix] in {workspace.root / 'hatch.toml'}",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(made, separators=(",", ":")))
    return 0


def _print_release(workspace: Workspace, text: str) -> int:
    """Print a package, given by its tag or name, and its dependants as NAME=VALUE."""
    try:
        name = text if text in workspace.names else parse_tag(text, workspace.names).package
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"package={name}")
    print(f"packages={' '.join([name, *workspace.dependants([name])])}")
    return 0


@dataclass(frozen=True)
class Change:
    """The packages to test.

    Attributes:
        direct: Packages whose files changed, siblings before the packages that need them.
        integration: Whether the packages have to be tested together.
        reason: A short explanation.
    """

    direct: tuple[str, ...]
    integration: bool
    reason: str


def find_change(workspace: Workspace, base: str) -> Change:
    """The change since the merge base with a revision, including uncommitted work.

    If there is no such commit, everything counts as changed: after a first push, in a shallow
    clone, after a forced push.
    """
    if not base.strip("0"):  # GitHub names no commit, or 40 zeros, before a first push
        return Change(workspace.names, True, "everything: no base to compare with")
    try:
        since = merge_base(workspace.root, base)
        return sort_files(workspace, changed_files(workspace.root, since, ["."]))
    except GitError as error:
        reason = f"everything: no merge base with {base} ({' '.join(str(error).split())})"
        return Change(workspace.names, True, reason)


def sort_files(workspace: Workspace, files: Iterable[str]) -> Change:
    """The packages that changed files concern.

    A file outside the packages may matter to all of them, so all are tested, unless it is a
    document or an integration test.
    """
    folders = {one.folder.name: one.name for one in workspace.distributions.values()}
    direct, integration, reason = set(), False, "nothing changed"
    for path in map(PurePosixPath, files):
        first, *rest = path.parts
        if path.suffix == ".md" and (
            first == PACKAGES_FOLDER or path.parent.as_posix() in _DOCS_FOLDERS
        ):
            reason = "only documents changed" if reason == "nothing changed" else reason
            continue
        reason = "changed"
        if first == PACKAGES_FOLDER and len(rest) > 1 and rest[0] in folders:
            direct.add(folders[rest[0]])
        elif first == _INTEGRATION_FOLDER:
            integration = True
        else:
            return Change(workspace.names, True, f"everything: {path} changed")
    return Change(workspace.order(direct), integration or bool(direct), reason)


def make_plan(workspace: Workspace, cells: Sequence[Cell], change: Change) -> dict[str, Any]:
    """The matrix of a change, with one entry of ``include`` per job. Cells are oldest first.

    Packages that changed are tested in all cells, their dependants in the oldest and the newest.
    """
    include = []
    packages = workspace.order((*change.direct, *workspace.dependants(change.direct)))
    for name in packages:
        jobs = list_jobs(workspace, workspace[name], cells)
        kept = jobs if name in change.direct else _take_ends(jobs)
        include += [{"package": name, **job} for job in kept]
    pythons = sorted({cell.python for cell in cells}, key=Version)
    return {
        "include": include,
        "packages": list(packages),
        "pythons": _take_ends(pythons),
        "integration": change.integration,
        "reason": change.reason,
    }


def list_jobs(
    workspace: Workspace, package: Distribution, cells: Iterable[Cell]
) -> list[dict[str, str]]:
    """The cells in which a package and its siblings can be installed, oldest first.

    If none of them needs torch, there is one job per Python.
    """
    needed = [package, *(workspace[name] for name in workspace.closure(package.name))]
    floors = [one.specifier for each in needed for one in each.dependencies if one.name == "torch"]
    possible = [
        cell
        for cell in cells
        if all(each.requires_python.contains(cell.python) for each in needed)
        and all(floor.contains(cell.torch, prereleases=True) for floor in floors)
    ]
    if floors:
        return [cell._asdict() for cell in possible]
    return [{"python": python} for python in dict.fromkeys(cell.python for cell in possible)]


def _take_ends(ordered: Sequence[Any]) -> list[Any]:
    return [*ordered[:1], *ordered[1:][-1:]]


if __name__ == "__main__":
    sys.exit(main())
