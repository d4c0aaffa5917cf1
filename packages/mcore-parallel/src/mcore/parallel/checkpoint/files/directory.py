"""A directory of checkpoints: which are complete, which is the latest, which to delete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.durable_files import (
    incomplete_sibling,
    is_incomplete_name,
    sync_directory,
)
from mcore.parallel.checkpoint.files.manifest import read_manifest, size_problem
from mcore.parallel.checkpoint.files.metadata_file import needed_sizes, read_metadata
from mcore.parallel.torch_compat import METADATA_FILE

_NAMED_STEP = re.compile(r"(?:step|iter|iteration)[_-]?(\d+)", re.I)
_NUMBER = re.compile(r"\d+")
PathLike = str | os.PathLike[str]


def is_complete_checkpoint(path: PathLike) -> bool:
    """Return whether a directory is a checkpoint with all its files at their full size.

    Looks at the file system only; no communication. Contents are not read, so a flipped bit
    goes unnoticed here (loading notices it).

    Args:
        path: The directory. A checkpoint that torch.distributed.checkpoint wrote by itself counts
            too, judged by its index.

    Returns:
        True or False; it never raises, whatever the directory contains.

    Example:
        >>> is_complete_checkpoint("/no/such/directory")
        False
    """
    directory = Path(path)
    if is_incomplete_name(directory.name) or not (directory / METADATA_FILE).is_file():
        return False
    try:
        files = read_manifest(directory)
        if files is None:
            sizes = needed_sizes(read_metadata(directory))
        else:
            sizes = {name: record.size for name, record in files.items()}
    except CheckpointingException:
        return False
    return all(
        size_problem(directory / name, size, at_least=files is None) is None
        for name, size in sizes.items()
    )


def list_checkpoints(root: PathLike) -> list[Path]:
    """List the complete checkpoints directly below a directory, oldest first.

    Looks at the file system only; no communication.

    Args:
        root: The directory; it need not exist.

    Returns:
        Paths in the order of the step number in their names (``step_20``, ``iter-20``, else the
        last number). When any name has no number, all are in the order of writing instead.

    Example:
        >>> list_checkpoints("/no/such/directory")
        []
    """
    found = [entry for entry in _entries(Path(root)) if is_complete_checkpoint(entry)]
    steps = {entry: _step_of(entry.name) for entry in found}
    if any(step is None for step in steps.values()):
        return sorted(found, key=lambda entry: (_written_at(entry), entry.name))
    return sorted(found, key=lambda entry: (steps[entry], _written_at(entry), entry.name))


def latest_checkpoint(root: PathLike) -> Path | None:
    """Return the newest complete checkpoint below a directory.

    Looks at the file system only; no communication.

    Args:
        root: The directory; it need not exist.

    Returns:
        The last of :func:`list_checkpoints`, or None when there is none.

    Example:
        >>> latest_checkpoint("/no/such/directory") is None
        True
    """
    return next(iter(reversed(list_checkpoints(root))), None)


def remove_incomplete(root: PathLike) -> list[Path]:
    """Delete what interrupted saves and deletions left below a directory.

    Call it on one rank while no save into ``root`` is running, at the start of a job for example.

    Args:
        root: The directory; it need not exist.

    Returns:
        The directories that were deleted. Nothing under a final name is touched.

    Raises:
        OSError: A directory cannot be deleted.

    Example:
        >>> remove_incomplete("/no/such/directory")
        []
    """
    left = [entry for entry in _entries(Path(root)) if is_incomplete_name(entry.name)]
    for entry in left:
        shutil.rmtree(entry)
    return left


def keep_last(root: PathLike, n: int) -> list[Path]:
    """Delete all but the newest ``n`` complete checkpoints below a directory.

    Only complete checkpoints count and only they are deleted, so the newest good one always stays,
    however many broken directories there are. Each is renamed before it is deleted, so a crash
    never leaves half of one. Call it on one rank, after a save has finished.

    Args:
        root: The directory; it need not exist.
        n: How many to keep, at least 1.

    Returns:
        The checkpoints that were deleted, oldest first.

    Raises:
        ValueError: ``n`` is below 1.
        OSError: A checkpoint cannot be deleted.

    Example:
        >>> keep_last("/no/such/directory", 2)
        []
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}: the newest checkpoint always stays")
    surplus = list_checkpoints(root)[:-n]
    for path in surplus:
        doomed = incomplete_sibling(path, secrets.randbits(63))
        path.rename(doomed)
        sync_directory(path.parent)
        shutil.rmtree(doomed)
    return surplus


def _entries(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(entry for entry in root.iterdir() if entry.is_dir())


def _step_of(name: str) -> int | None:
    named = _NAMED_STEP.findall(name) or _NUMBER.findall(name)
    return int(named[-1]) if named else None


def _written_at(checkpoint: Path) -> int:
    """Return nanoseconds; the index is written once, while a directory's own time moves on."""
    return (checkpoint / METADATA_FILE).stat().st_mtime_ns
