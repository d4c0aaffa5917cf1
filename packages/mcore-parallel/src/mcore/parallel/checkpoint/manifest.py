"""The list of a checkpoint's files and their sizes, written last and checked first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore.parallel.checkpoint.durable_files import write_file
from mcore.parallel.checkpoint.errors import CheckpointingException

__all__ = ["MANIFEST_FILE", "read_manifest", "size_problem", "write_manifest"]

MANIFEST_FILE = "manifest.json"
_FORMAT = "mcore sharded checkpoint"
_VERSION = 1


def write_manifest(directory: Path, sizes: Mapping[str, int]) -> None:
    """Write the manifest of a directory durably.

    Args:
        directory: The checkpoint, still under its incomplete name.
        sizes: Size of each file in bytes by its name.
    """
    content = {"format": _FORMAT, "version": _VERSION, "files": dict(sorted(sizes.items()))}
    write_file(directory / MANIFEST_FILE, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(directory: Path) -> dict[str, int] | None:
    """Read the sizes of a checkpoint's files.

    Args:
        directory: The checkpoint.

    Returns:
        Size in bytes by name; None when there is no manifest, as in checkpoints that
        torch.distributed.checkpoint wrote by itself.

    Raises:
        CheckpointingException: The manifest cannot be read or is of another format.
    """
    path = directory / MANIFEST_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointingException(
            f"{path} cannot be read ({error}); take another checkpoint"
        ) from error
    return _checked(path, content)


def _checked(path: Path, content: Any) -> dict[str, int]:
    known = isinstance(content, dict) and content.get("format") == _FORMAT
    if not known or content.get("version") != _VERSION:
        raise CheckpointingException(
            f"{path} is not the manifest of {_FORMAT!r} version {_VERSION}; the directory is "
            "something else, or a newer version of mcore-parallel wrote it"
        )
    files = content.get("files")
    if not isinstance(files, dict) or not all(isinstance(size, int) for size in files.values()):
        raise CheckpointingException(f"{path} lists no files; take another checkpoint")
    return files


def size_problem(path: Path, expected: int, *, at_least: bool = False) -> str | None:
    """Compare a file's size with what it must be.

    Args:
        path: The file.
        expected: Size in bytes.
        at_least: Whether a larger file is fine too.

    Returns:
        A sentence that names the file, or None when all is well.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); take another checkpoint"
    if found == expected or (at_least and found > expected):
        return None
    return (
        f"{path} has {found} bytes but {expected} were saved: it is truncated or was changed; "
        "take another checkpoint"
    )
