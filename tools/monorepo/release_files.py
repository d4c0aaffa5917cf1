"""Changing several files so that either all are changed or none."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile


def write_all(contents: Mapping[Path, str], deleted: Collection[Path] = ()) -> None:
    """Write and delete files; a failure puts back what was there.

    Every new text is on the disk in a file of its own before the first one takes its place.

    Args:
        contents: The new texts.
        deleted: Files to delete.
    """
    before = {path: path.read_bytes() if path.exists() else None for path in (*contents, *deleted)}
    staged: dict[Path, Path] = {}
    try:
        for path, text in contents.items():
            staged[path] = _stage(path, text)
        for path, waiting in staged.items():
            os.replace(waiting, path)
        for path in deleted:
            path.unlink()
    except BaseException:
        _put_back(before)
        raise
    finally:
        for waiting in staged.values():
            waiting.unlink(missing_ok=True)


def _stage(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=".release-", delete=False) as file:
        file.write(text.encode())
    staged = Path(file.name)
    if path.exists():
        staged.chmod(path.stat().st_mode)
    else:
        staged.chmod(0o644)
    return staged


def _put_back(before: Mapping[Path, bytes | None]) -> None:
    for path, content in before.items():
        if content is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
