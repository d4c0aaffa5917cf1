"""What is unreleased."""

from __future__ import annotations

from monorepo.changelog import FOLDER, ChangelogError, fragments
from monorepo.git_tags import changed_files, last_tag
from monorepo.workspace import Distribution, Workspace

SHIPPED = ("src", "pyproject.toml")


def show(workspace: Workspace, name: str) -> list[str]:
    """What would go into the next release of a package, in lines for people."""
    package = workspace[name]
    tag = last_tag(workspace.root, package.name, workspace.names)
    if tag is None:
        head = f"{package.name} {package.version}: no release tag yet"
        return [head, *_fragment_lines(package)]
    changed = shipped_changes(workspace, package, tag.name)
    what = f"{len(changed)} shipped files changed" if changed else "nothing shipped changed"
    head = f"{package.name} {package.version}: {what} since {tag.name}"
    return [head, *(f"  {file}" for file in changed), *_fragment_lines(package)]


def shipped_changes(workspace: Workspace, package: Distribution, since: str) -> list[str]:
    """Files that go into the package and differ from a tag, relative to the repository."""
    folder = package.folder.relative_to(workspace.root).as_posix()
    return changed_files(workspace.root, since, [f"{folder}/{part}" for part in SHIPPED])


def _fragment_lines(package: Distribution) -> list[str]:
    try:
        found = fragments(package)
    except ChangelogError as error:
        return [f"  {error}"]
    return [f"  {FOLDER}/{one.file.name}: {one.text.splitlines()[0]}" for one in found]
