"""A package with its siblings at the lowest releases that its ranges allow.

A range such as ``>=0.1`` claims that the code works with what was tagged as 0.1. This takes the
files of those tags, builds them, installs the package beside them alone, and runs its tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from monorepo.git_tags import ReleaseTag, export_tree, release_tags
from monorepo.isolation.run import IsolationRun
from monorepo.isolation.wheels import build_wheels
from monorepo.ranges import sibling_requirements, spelled
from monorepo.workspace import Workspace, load_workspace


def check_floors(workspace: Workspace, name: str, *, python: str, torch: str) -> Iterator[str]:
    """Test a package with its siblings at their floors; yields what was found, line by line."""
    package = workspace[name]
    tags = floor_tags(workspace, package.name)
    for requirement, sibling in sibling_requirements(package, workspace):
        if sibling.name not in tags:
            yield f"no release of {sibling.name} fits {spelled(requirement)}: taken as it is here"
    if not tags:
        yield f"{package.name} has no sibling with a release tag: nothing to go back to"
        return
    with tempfile.TemporaryDirectory(prefix="floors-") as folder:
        scratch = Path(folder).resolve()
        wheels = floor_wheels(workspace, package.name, tags, scratch)
        IsolationRun(workspace, wheels, scratch / "run", python, torch).check(package.name)
    yield f"{package.name} works with {', '.join(tag.name for tag in tags.values())}"


def floor_tags(workspace: Workspace, name: str) -> dict[str, ReleaseTag]:
    """The lowest released version of each sibling that the ranges of a package take."""
    found = {}
    for requirement, sibling in sibling_requirements(workspace[name], workspace):
        for tag in release_tags(workspace.root, sibling.name, workspace.names):
            if requirement.specifier.contains(tag.version, prereleases=True):
                found[sibling.name] = tag
                break
    return found


def floor_wheels(
    workspace: Workspace, name: str, tags: dict[str, ReleaseTag], scratch: Path
) -> dict[str, Path]:
    """The wheels of a package and of what comes with it, siblings at their given tags."""
    here = [workspace[each] for each in (*workspace.closure(name), name) if each not in tags]
    wheels = build_wheels(here, scratch / "here")
    for sibling, tag in tags.items():
        tree = scratch / tag.name
        tree.mkdir()
        folder = workspace[sibling].folder.relative_to(workspace.root).as_posix()
        export_tree(workspace.root, tag.name, tree, folder)
        tagged = load_workspace(tree)[sibling]
        wheels |= build_wheels([tagged], scratch / "tagged")
    return wheels
