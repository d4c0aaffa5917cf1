"""A directory of checkpoints: list the complete ones, find the latest, delete the old ones."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import overload

from mcore.parallel.checkpoint.errors import CheckpointingException, find_passing
from mcore.parallel.checkpoint.files.index import file_problems, read_index
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE
from mcore.parallel.checkpoint.files.places import (
    PathLike,
    Place,
    RemotePath,
    local_path,
    place_of,
)
from mcore.parallel.checkpoint.files.save_place import (
    incomplete_sibling,
    is_incomplete_name,
    remove_leftovers,
    sync_directory,
)
from mcore.parallel.torch_compat import METADATA_FILE

CHECKPOINT_NAMES = r"(?:step|iter)_(\d+)"
"""The names of a run's checkpoints: ``step_20``, ``iter_0000020``."""

Pattern = str | re.Pattern[str]


def is_complete_checkpoint(path: PathLike) -> bool:
    """Return whether a directory is a checkpoint with all its files at their full size.

    Reads the file system only, without communication. Of the files only the manifest is read, so a
    flipped bit in another file is found by a load, not here. No code in the files is run.

    Args:
        path: The directory, or its URL. A checkpoint of torch.distributed.checkpoint is accepted
            too and checked by its index.

    Returns:
        True or False, for any content of the directory.

    Raises:
        CheckpointingException: The storage of a URL does not respond, or an error of the file
            system says nothing about the content. Also an OSError.

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
        if find_passing(error):
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

    Reads the file system only, without communication. Links are not listed.

    Args:
        root: The directory, or a URL of fsspec. It need not exist.
        pattern: A regular expression that the whole name matches. Its first group is the step.
            Without groups, checkpoints are sorted by the time of writing.

    Returns:
        Paths in the order of their steps. For a URL they are objects with ``name``, ``parent`` and
        ``/``, and ``str()`` returns the URL.

    Raises:
        CheckpointingException: ``root`` is a URL that no installed package can reach.
        ValueError: ``pattern`` is not a regular expression, or its first group is not a number.

    Example:
        >>> list_checkpoints("/no/such/directory")
        []
    """
    return [entry for entry in _sort_named(root, pattern) if _is_complete(place_of(entry))]


def _sort_named(root: PathLike, pattern: Pattern) -> list[Place]:
    """List the directories with the name of a checkpoint, complete or not, oldest first."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    folder = place_of(root)
    entries = folder.folders() if isinstance(folder, RemotePath) else _list_local_folders(root)
    matches = {entry: expression.fullmatch(entry.name) for entry in entries}
    found = {entry: match for entry, match in matches.items() if match}
    steps = {
        entry: _read_step(match, expression) if expression.groups else 0
        for entry, match in found.items()
    }
    has_ties = len(set(steps.values())) < len(steps)  # only then does the time matter
    times = {entry: _read_time(entry) if has_ties else 0 for entry in steps}
    return sorted(steps, key=lambda entry: (steps[entry], times[entry], entry.name))


@overload
def latest_checkpoint(root: Path, *, pattern: Pattern = CHECKPOINT_NAMES) -> Path | None: ...
@overload
def latest_checkpoint(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> Place | None: ...
def latest_checkpoint(root: PathLike, *, pattern: Pattern = CHECKPOINT_NAMES) -> Place | None:
    """Return the newest complete checkpoint of a run below a directory.

    Reads the file system only, without communication.

    Args:
        root: The directory, or its URL. It need not exist.
        pattern: As in :func:`list_checkpoints`.

    Returns:
        The last of :func:`list_checkpoints`, or None if there is none.

    Example:
        >>> latest_checkpoint("/no/such/directory") is None
        True
    """
    newest_first = reversed(_sort_named(root, pattern))
    return next((entry for entry in newest_first if _is_complete(place_of(entry))), None)


def remove_incomplete(root: PathLike) -> list[Place]:
    """Delete the leftovers of interrupted saves and deletions below a directory.

    Call it on one rank while no save into ``root`` is running, at the start of a job for example.

    Args:
        root: The directory, or its URL. It need not exist.

    Returns:
        The directories that were deleted. Complete checkpoints are never deleted.

    Raises:
        OSError: A directory cannot be deleted.

    Example:
        >>> remove_incomplete("/no/such/directory")
        []
    """
    folder = place_of(root)
    if isinstance(folder, RemotePath):
        return [entry for entry in folder.folders() if remove_leftovers(entry)]
    left = [entry for entry in _list_local_folders(root) if is_incomplete_name(entry.name)]
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

    Only complete checkpoints with a name that matches ``pattern`` are counted and deleted. The
    newest good checkpoint always stays, however many broken directories there are. Links are not
    counted, deleted or followed. A crash never leaves half a checkpoint: before the files are
    deleted, the checkpoint is renamed or, at a URL, its manifest is deleted. Call it on one rank,
    after a save has finished.

    Args:
        root: The directory, or its URL. It need not exist.
        n: The number of checkpoints to keep, at least 1.
        pattern: As in :func:`list_checkpoints`.
        protect: Names in ``root``, or paths, of checkpoints that are neither counted nor deleted. A
            link protects its target.

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
    given = [protect] if isinstance(protect, str | bytes | os.PathLike) else list(protect)
    folder = place_of(root)
    protected = {
        _resolve(folder / text if len(Path(text).parts) == 1 else place_of(text))
        for text in (os.fsdecode(one) for one in given)
    }
    surplus = [
        entry
        for entry in list_checkpoints(root, pattern=pattern)
        if _resolve(entry) not in protected
    ][:-n]
    for entry in surplus:
        _delete(entry)
    return surplus


def _delete(checkpoint: Place) -> None:
    """Delete a checkpoint that looks complete or absent at any moment."""
    if isinstance(checkpoint, RemotePath):
        for name in (MANIFEST_FILE, METADATA_FILE):
            (checkpoint / name).remove()
        checkpoint.remove_all()
        return
    doomed = incomplete_sibling(checkpoint, secrets.randbits(63))
    checkpoint.rename(doomed)
    sync_directory(checkpoint.parent)
    shutil.rmtree(doomed)


def _resolve(place: Place) -> Place:
    return place if isinstance(place, RemotePath) else place.resolve()


def _list_local_folders(root: PathLike) -> list[Path]:
    """List the directories below another one, without links to directories."""
    folder = local_path(root)
    if not folder.is_dir():
        return []
    given = Path(os.path.expanduser(os.fsdecode(root)))
    return sorted(
        given / entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
    )


def _read_step(match: re.Match[str], expression: re.Pattern[str]) -> int:
    try:
        return int(match[1])
    except (TypeError, ValueError):
        raise ValueError(
            f"the first group of pattern {expression.pattern!r} must be the step, got {match[1]!r} "
            f"in {match[0]!r}; use (?:...) for other groups"
        ) from None


def _read_time(checkpoint: Place) -> int:
    """Return the time of writing in nanoseconds."""
    # The time of the directory changes with each file in it. An index is written once.
    for name in (MANIFEST_FILE, METADATA_FILE):
        with suppress(OSError):
            file = checkpoint / name
            return file.written_at_ns() if isinstance(file, RemotePath) else file.stat().st_mtime_ns
    return 0
