"""The two sides of a comparison: the files of a revision, or the working tree."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from monorepo.git_tags import export_tree
from monorepo.workspace import PACKAGES_FOLDER, Distribution, Workspace, load_workspace


class CannotCheckError(RuntimeError):
    """The comparison could not be made."""


@contextmanager
def tree_at(root: Path, revision: str | None) -> Iterator[Workspace]:
    """The packages of a revision, whose files are gone afterwards; None is the working tree."""
    if revision is None:
        yield load_workspace(root)
        return
    folder = Path(mkdtemp(prefix="api-check-"))
    try:
        export_tree(root, revision, folder, PACKAGES_FOLDER)
        yield load_workspace(folder)
    finally:
        shutil.rmtree(folder)


def refuse_unparsable(package: Distribution) -> None:
    """Make sure that a package can be read as a whole."""
    for file in sorted(package.source.rglob("*.py")):
        try:
            ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        except (SyntaxError, ValueError) as error:
            shown = file.relative_to(package.folder)
            raise CannotCheckError(f"{package.name}: {shown} can't be parsed: {error}") from error
