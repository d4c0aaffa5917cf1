"""Which packages a change of files touches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from monorepo.workspace import PACKAGES_FOLDER, Workspace

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

    Args:
        workspace: The repository after the change.
        files: Paths relative to its root; of a renamed file both.

    Returns:
        The packages, those hit through their dependencies included.
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
