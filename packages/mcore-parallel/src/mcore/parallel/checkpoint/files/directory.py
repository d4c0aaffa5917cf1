"""A directory of checkpoints: which are complete, which is the latest, which to delete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import overload

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.durable_files import (
    incomplete_sibling,
    is_incomplete_name,
    sync_directory,
)
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, file_problems, read_index
from mcore.parallel.checkpoint.files.regular_files import PathLike, Place, local_path, place_of
from mcore.parallel.checkpoint.files.remote import RemotePath, is_unreachable
from mcore.parallel.checkpoint.files.save_place import remove_leftovers
from mcore.parallel.torch_compat import METADATA_FILE

CHECKPOINT_NAMES = r"(?:step|iter)_(\d+)"
"""What names the checkpoints of a run: ``step_20``, ``iter_0000020``."""

Pattern = str | re.Pattern[str]


def is_complete_checkpoint(path: PathLike) -> bool:
    """Return whether a directory is a checkpoint with all its files at their full size.

    Looks at the file system only; no communication. Only the manifest is read, so a flipped bit
    elsewhere goes unnoticed here (loading notices it). Nothing that the files hold is run.

    Args:
        path: The directory, or its URL. A checkpoint that torch.distributed.checkpoint wrote by
            itself counts too, judged by its index.

    Returns:
        True or False, whatever the directory contains.

    Raises:
        CheckpointingException: The storage behind a URL does not answer. Also an OSError.

    Example:
        >>> is_complete_checkpoint("/no/such/directory")
        False
    """
    return _is_complete(place_of(path))


def _is_complete(directory: Place) -> bool:
    if is_incomplete_name(directory.name):
        return False
    try:
        return next(file_problems(directory, read_index(directory)), None) is None
    except (CheckpointingException, OSError) as error:
        if is_unreachable(error):
            raise
        return False


@overload
def list_checkpoints(root: Path, *, pattern: Pattern = CHECKPOINT_NAMES) -> list[Path]: ...
@overload
def list_checkpoints(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> list[Place]: ...
def list_checkpoints(
    root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES
) -> list[Path] | list[Place]:
    """List the complete checkpoints of a run, directly below a directory, oldest first.

    Looks at the file system only; no communication. Links are not listed.

    Args:
        root: The directory, or a URL of fsspec; it need not exist.
        pattern: A regular expression that the whole name matches. Its first group is the step; one
            without groups makes the time of writing decide.

    Returns:
        Paths in the order of their steps. Of a URL they are objects with ``name``, ``parent`` and
        ``/`` whose ``str()`` is a URL.

    Raises:
        CheckpointingException: ``root`` is a URL that nothing installed here can reach.
        ValueError: ``pattern`` is not a regular expression, or its first group is not a number.

    Example:
        >>> list_checkpoints("/no/such/directory")
        []
    """
    return [entry for entry in _named(root, pattern) if _is_complete(place_of(entry))]


def _named(root: PathLike, pattern: Pattern) -> list[Place]:
    """List what has the name of a checkpoint, complete or not, oldest first."""
    expression = _compiled(pattern)
    matches = {entry: expression.fullmatch(entry.name) for entry in _entries(root)}
    found = {entry: match for entry, match in matches.items() if match}
    steps = {
        entry: _step(match, expression) if expression.groups else 0
        for entry, match in found.items()
    }
    has_ties = len(set(steps.values())) < len(steps)  # only then does the time matter
    times = {entry: _written_at(entry) if has_ties else 0 for entry in steps}
    return sorted(steps, key=lambda entry: (steps[entry], times[entry], entry.name))


@overload
def latest_checkpoint(root: Path, *, pattern: Pattern = CHECKPOINT_NAMES) -> Path | None: ...
@overload
def latest_checkpoint(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> Place | None: ...
def latest_checkpoint(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> Place | None:
    """Return the newest complete checkpoint of a run below a directory.

    Looks at the file system only; no communication.

    Args:
        root: The directory, or its URL; it need not exist.
        pattern: As in :func:`list_checkpoints`.

    Returns:
        The last of :func:`list_checkpoints`, or None when there is none.

    Example:
        >>> latest_checkpoint("/no/such/directory") is None
        True
    """
    newest_first = reversed(_named(root, pattern))
    return next((entry for entry in newest_first if _is_complete(place_of(entry))), None)


def remove_incomplete(root: PathLike) -> list[Place]:
    """Delete what interrupted saves and deletions left below a directory.

    Call it on one rank while no save into ``root`` is running, at the start of a job for example.

    Args:
        root: The directory, or its URL; it need not exist.

    Returns:
        The directories that were deleted. Nothing complete is touched.

    Raises:
        OSError: A directory cannot be deleted.

    Example:
        >>> remove_incomplete("/no/such/directory")
        []
    """
    folder = place_of(root)
    if isinstance(folder, RemotePath):
        return [entry for entry in folder.folders() if remove_leftovers(entry)]
    left = [entry for entry in _local_entries(root) if is_incomplete_name(entry.name)]
    for entry in left:
        shutil.rmtree(entry)
    return [*left]


def keep_last(
    root: PathLike,
    n: int,
    *,
    pattern: Pattern = CHECKPOINT_NAMES,
    protect: Iterable[PathLike] = (),
) -> list[Place]:
    """Delete all but the newest ``n`` complete checkpoints of a run below a directory.

    Only complete checkpoints whose name matches ``pattern`` count and only they are deleted, so the
    newest good one always stays, however many broken directories there are. Links neither count nor
    are they deleted or followed. Each checkpoint is renamed before it is deleted, behind a URL its
    manifest deleted first, so a crash never leaves half of one. Call it on one rank, after a save
    has finished.

    Args:
        root: The directory, or its URL; it need not exist.
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
    protected = _protected(root, protect)
    surplus = [
        entry
        for entry in list_checkpoints(root, pattern=pattern)
        if _resolved(entry) not in protected
    ][:-n]
    for entry in surplus:
        _delete(entry)
    return surplus


def _delete(checkpoint: Place) -> None:
    """Delete a checkpoint that at no moment is half of one."""
    if isinstance(checkpoint, RemotePath):
        for name in (MANIFEST_FILE, METADATA_FILE):
            (checkpoint / name).remove()
        checkpoint.remove_all()
        return
    doomed = incomplete_sibling(checkpoint, secrets.randbits(63))
    checkpoint.rename(doomed)
    sync_directory(checkpoint.parent)
    shutil.rmtree(doomed)


def _protected(root: PathLike, protect: Iterable[PathLike]) -> set[Place]:
    given = [protect] if isinstance(protect, str | os.PathLike) else list(protect)
    folder = place_of(root)
    texts = [os.fspath(one) for one in given]
    return {
        _resolved(folder / one if len(Path(one).parts) == 1 else place_of(one)) for one in texts
    }


def _resolved(place: Place) -> Place:
    return place if isinstance(place, RemotePath) else place.resolve()


def _entries(root: PathLike) -> list[Place]:
    """List the directories below another one, without links to directories."""
    folder = place_of(root)
    return [*(folder.folders() if isinstance(folder, RemotePath) else _local_entries(root))]


def _local_entries(root: PathLike) -> list[Path]:
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


def _written_at(checkpoint: Place) -> int:
    """Return nanoseconds; an index is written once, while a directory's own time moves on."""
    for name in (MANIFEST_FILE, METADATA_FILE):
        with suppress(OSError):
            file = checkpoint / name
            return file.written_at_ns() if isinstance(file, RemotePath) else file.stat().st_mtime_ns
    return 0
