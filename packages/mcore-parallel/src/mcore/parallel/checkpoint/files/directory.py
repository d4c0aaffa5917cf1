"""A directory of checkpoints: which are complete, which is the latest, which to delete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.durable_files import (
    incomplete_sibling,
    is_incomplete_name,
    sync_directory,
)
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, file_problems, read_index
from mcore.parallel.checkpoint.files.regular_files import PathLike, local_path
from mcore.parallel.torch_compat import METADATA_FILE

CHECKPOINT_NAMES = r"(?:step|iter)_(\d+)"
"""What names the checkpoints of a run: ``step_20``, ``iter_0000020``."""

Pattern = str | re.Pattern[str]


def is_complete_checkpoint(path: PathLike) -> bool:
    """Return whether a directory is a checkpoint with all its files at their full size.

    Looks at the file system only; no communication. Only the manifest is read, so a flipped bit
    elsewhere goes unnoticed here (loading notices it). Nothing that the files hold is run.

    Args:
        path: The directory. A checkpoint that torch.distributed.checkpoint wrote by itself counts
            too, judged by its index.

    Returns:
        True or False, whatever the directory contains.

    Raises:
        CheckpointingException: ``path`` is a URL.

    Example:
        >>> is_complete_checkpoint("/no/such/directory")
        False
    """
    return _is_complete(local_path(path))


def _is_complete(directory: Path) -> bool:
    if is_incomplete_name(directory.name):
        return False
    try:
        index = read_index(directory)
    except (CheckpointingException, OSError):
        return False
    return next(file_problems(directory, index), None) is None


def list_checkpoints(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> list[Path]:
    """List the complete checkpoints of a run, directly below a directory, oldest first.

    Looks at the file system only; no communication. Links are not listed.

    Args:
        root: The directory; it need not exist.
        pattern: A regular expression that the whole name matches. Its first group is the step; one
            without groups makes the time of writing decide.

    Returns:
        Paths in the order of their steps.

    Raises:
        CheckpointingException: ``root`` is a URL.
        ValueError: ``pattern`` is not a regular expression, or its first group is not a number.

    Example:
        >>> list_checkpoints("/no/such/directory")
        []
    """
    expression = _compiled(pattern)
    named = [(entry, expression.fullmatch(entry.name)) for entry in _entries(root)]
    found = [(entry, match) for entry, match in named if match and _is_complete(entry)]
    if not expression.groups:
        return sorted(
            (entry for entry, _ in found), key=lambda entry: (_written_at(entry), entry.name)
        )
    steps = {entry: _step(match, expression) for entry, match in found}
    return sorted(steps, key=lambda entry: (steps[entry], _written_at(entry), entry.name))


def latest_checkpoint(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> Path | None:
    """Return the newest complete checkpoint of a run below a directory.

    Looks at the file system only; no communication.

    Args:
        root: The directory; it need not exist.
        pattern: As in :func:`list_checkpoints`.

    Returns:
        The last of :func:`list_checkpoints`, or None when there is none.

    Example:
        >>> latest_checkpoint("/no/such/directory") is None
        True
    """
    return next(iter(reversed(list_checkpoints(root, pattern=pattern))), None)


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
    left = [entry for entry in _entries(root) if is_incomplete_name(entry.name)]
    for entry in left:
        shutil.rmtree(entry)
    return left


def keep_last(
    root: PathLike,
    n: int,
    *,
    pattern: Pattern = CHECKPOINT_NAMES,
    protect: Iterable[PathLike] = (),
) -> list[Path]:
    """Delete all but the newest ``n`` complete checkpoints of a run below a directory.

    Only complete checkpoints whose name matches ``pattern`` count and only they are deleted, so the
    newest good one always stays, however many broken directories there are. Links neither count nor
    are they deleted or followed. Each checkpoint is renamed before it is deleted, so a crash never
    leaves half of one. Call it on one rank, after a save has finished.

    Args:
        root: The directory; it need not exist.
        n: How many to keep, at least 1.
        pattern: As in :func:`list_checkpoints`.
        protect: Names in ``root``, or paths, of checkpoints that neither count nor are deleted; a
            link protects what it points to.

    Returns:
        The checkpoints that were deleted, oldest first.

    Raises:
        ValueError: ``n`` is below 1.
        OSError: A checkpoint cannot be deleted.

    Example:
        >>> keep_last("/no/such/directory", 2, protect=["step_1000"])
        []
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}: the newest checkpoint always stays")
    folder = local_path(root)
    protected = _protected(folder, protect)
    counted = [
        path for path in list_checkpoints(root, pattern=pattern) if path.resolve() not in protected
    ]
    surplus = counted[:-n]
    for path in surplus:
        doomed = incomplete_sibling(path, secrets.randbits(63))
        path.rename(doomed)
        sync_directory(path.parent)
        shutil.rmtree(doomed)
    return surplus


def _protected(root: Path, protect: Iterable[PathLike]) -> set[Path]:
    given = [protect] if isinstance(protect, str | os.PathLike) else list(protect)
    places = [root / one if len(Path(one).parts) == 1 else local_path(one) for one in given]
    return {place.resolve() for place in places}


def _entries(root: PathLike) -> list[Path]:
    """List the directories below another one, without links to directories."""
    folder = local_path(root)
    if not folder.is_dir():
        return []
    given = Path(os.path.expanduser(root))
    return sorted(
        given / entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
    )


def _compiled(pattern: Pattern) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _step(match: re.Match[str], expression: re.Pattern[str]) -> int:
    try:
        return int(match[1])
    except (TypeError, ValueError):
        raise ValueError(
            f"the first group of pattern {expression.pattern!r} must be the step, got {match[1]!r} "
            f"in {match[0]!r}; use (?:...) for groups that are none"
        ) from None


def _written_at(checkpoint: Path) -> int:
    """Return nanoseconds; an index is written once, while a directory's own time moves on."""
    for name in (MANIFEST_FILE, METADATA_FILE):
        try:
            return (checkpoint / name).stat().st_mtime_ns
        except OSError:
            continue
    return 0
