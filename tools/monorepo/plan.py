"""Command line: ``python -m monorepo.plan [--base REF | --release TAG]``.

Prints the test matrix of a change as one line of JSON, or the packages that a release concerns.
Needs Python >= 3.11 and ``packaging`` only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from monorepo.git_tags import GitError, changed_files, merge_base, parse_tag
from monorepo.hatch_settings import Cell, matrix_cells
from monorepo.workspace import PACKAGES_FOLDER, REPOSITORY, Distribution, Workspace, load_workspace

# More jobs than that in one matrix are refused by GitHub.
MOST_JOBS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, and the reason for it on the error stream; 1 if it cannot be run."""
    options = _parser().parse_args(arguments)
    workspace = load_workspace(options.root)
    if options.release:
        return _print_release(workspace, options.release)
    made = plan(workspace, matrix_cells(workspace.root), what_changed(workspace, options.base))
    print(made["reason"], file=sys.stderr)
    told = refusal(made)
    if told:
        print(f"{told} in {workspace.root / 'hatch.toml'}", file=sys.stderr)
        return 1
    print(json.dumps(made, separators=(",", ":")))
    return 0


def _print_release(workspace: Workspace, text: str) -> int:
    """Print the package of a tag, or one that is named, and its dependants as NAME=VALUE."""
    try:
        name = text if text in workspace.names else parse_tag(text, workspace.names).package
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"package={name}")
    print(f"packages={' '.join([name, *workspace.dependants([name])])}")
    return 0


def refusal(made: Mapping[str, Any]) -> str | None:
    """What is wrong with a plan, as the beginning of a sentence; None where it can be run."""
    count = len(made["include"])
    if count > MOST_JOBS:
        return f"{count} jobs, and a matrix may have {MOST_JOBS}: take cells out of [envs.matrix]"
    tested = {job["package"] for job in made["include"]}
    left_out = [name for name in made["packages"] if name not in tested]
    if left_out:
        return f"no cell that {', '.join(left_out)} can be installed in: add one to [envs.matrix]"
    return None


def what_changed(workspace: Workspace, base: str) -> Affected:
    """What the work since the merge base with a revision touches, uncommitted work included.

    Everything, where there is no such commit: a first push, a shallow clone, a forced push.
    """
    if not base.strip("0"):
        return everything(workspace, "everything: no base to compare with")
    try:
        since = merge_base(workspace.root, base)
        return affected(workspace, changed_files(workspace.root, since, ["."]))
    except GitError as error:
        said = " ".join(str(error).split())
        return everything(workspace, f"everything: no merge base with {base} ({said})")


def plan(workspace: Workspace, cells: Iterable[Cell], change: Affected) -> dict[str, Any]:
    """The matrix of a change, one entry of ``include`` per job; cells are oldest first."""
    every = list(cells)
    include = []
    for name in workspace.ordered((*change.direct, *change.dependants)):
        possible = jobs(workspace, workspace[name], every)
        direct = name in change.direct
        kept = possible if direct else newest_and_oldest(possible)
        include += [{"package": name, **job, "direct": direct} for job in kept]
    return {
        "include": include,
        "packages": list(workspace.ordered((*change.direct, *change.dependants))),
        "integration": change.integration,
        "reason": change.reason,
    }


def jobs(
    workspace: Workspace, package: Distribution, cells: Iterable[Cell]
) -> list[dict[str, str]]:
    """The cells that a package and all that it needs can be installed in, oldest first.

    Where none of them needs torch, the cells of one Python are one job.
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
        return [{"python": cell.python, "torch": cell.torch} for cell in possible]
    return [{"python": python} for python in dict.fromkeys(cell.python for cell in possible)]


def newest_and_oldest(possible: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The two ends of a list of jobs; the one job where there is no other."""
    return [*possible[:1], *possible[1:][-1:]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.plan", description="Print the test matrix of a change."
    )
    parser.add_argument(
        "--base", default="", metavar="REF", help="what it is compared with; without, everything"
    )
    parser.add_argument("--release", metavar="TAG", help="a release tag, or just a package")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    return parser


_INTEGRATION_FOLDER = "tests-integration"
_DOCS_FOLDERS = (".", ".github")


@dataclass(frozen=True)
class Affected:
    """What has to be tested.

    Attributes:
        direct: Packages whose own files changed, siblings before those that need them.
        dependants: Packages that need one of those, directly or not.
        integration: Whether the packages have to be tested together.
        reason: Why, in a few words.
    """

    direct: tuple[str, ...]
    dependants: tuple[str, ...]
    integration: bool
    reason: str


def everything(workspace: Workspace, reason: str) -> Affected:
    """All packages, as if each had changed."""
    return Affected(workspace.names, (), True, reason)


def affected(workspace: Workspace, files: Iterable[str]) -> Affected:
    """What a change of files touches.

    A file that belongs to no package may matter to any of them, so it stands for all of them,
    unless it is known not to.
    """
    changed = [PurePosixPath(file) for file in files]
    folders = {one.folder.name: one.name for one in workspace.distributions.values()}
    direct = set()
    integration = False
    for path in changed:
        first, *rest = path.parts
        if _is_docs(path):
            continue
        if first == PACKAGES_FOLDER and len(rest) > 1 and rest[0] in folders:
            direct.add(folders[rest[0]])
        elif first == _INTEGRATION_FOLDER:
            integration = True
        else:
            return everything(workspace, f"everything: {path} changed")
    reason = "changed" if direct or integration else "only documents changed"
    return Affected(
        direct=workspace.ordered(direct),
        dependants=workspace.dependants(direct),
        integration=integration or bool(direct),
        reason=reason if changed else "nothing changed",
    )


def _is_docs(path: PurePosixPath) -> bool:
    """Documents of the repository or of a package; not those that a tool or a test may read."""
    if path.suffix != ".md":
        return False
    return path.parts[0] == PACKAGES_FOLDER or path.parent.as_posix() in _DOCS_FOLDERS


if __name__ == "__main__":
    sys.exit(main())
