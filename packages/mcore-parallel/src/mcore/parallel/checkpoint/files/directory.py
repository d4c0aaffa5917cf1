"""Directories of checkpoints: how a save makes one in one step, and how a run's are listed.

On a mounted file system, the files are written into a hidden folder, which one rename makes the
checkpoint. At a URL nothing can be renamed in one step. There the files are written into the final
folder, under names that no other save uses, and the manifest that lists them is written last.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, overload

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error, find_passing
from mcore.parallel.checkpoint.files.index import OUR_MARK, file_problems, read_index
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE
from mcore.parallel.checkpoint.files.places import (
    PathLike,
    Place,
    RemotePath,
    list_folders,
    place_of,
    size_problems,
)
from mcore.parallel.torch_compat import METADATA_FILE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

CHECKPOINT_NAMES = r"(?:step|iter)_(\d+)"
"""The names of a run's checkpoints: ``step_20``, ``iter_0000020``."""

Pattern = str | re.Pattern[str]
# The errors of file systems without a sync of directories.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_ONCE_BYTES = 1 << 24
_INCOMPLETE = re.compile(r"\..+\.incomplete-[0-9a-f]{16}", re.S)
_REMOTE_PAYLOAD = re.compile(r"__\d+_0-[0-9a-f]{16}\.distcp")


class LocalSave:
    """A save in a hidden folder next to its final place. Each method syncs its changes.

    The folder is locked until :meth:`close`, or until the process ends.
    """

    def __init__(self, final: Path, token: int) -> None:
        self.final, self.folder = final, incomplete_sibling(final, token)
        self._lock = ExitStack()

    def begin(self) -> None:
        """Make the folder on every rank: shared file systems show it late to other hosts."""
        self.folder.mkdir(exist_ok=True)
        self._lock.enter_context(_lock_folder(self.folder, is_shared=True))

    def file_of(self, rank: int) -> Path:
        """Return the file that a rank writes."""
        return self.folder / f"__{rank}_0.distcp"

    @contextmanager
    def new_file(self, rank: int) -> Iterator[Any]:
        """Yield a stream to a rank's file, which is on storage after the block."""
        with new_large_file(self.file_of(rank)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        sync_directory(self.folder)  # the name of the file, which fsync does not include

    def write(self, name: str, content: bytes) -> None:
        """Write torch's index, or then the manifest of files that are on storage."""
        write_file(self.folder / name, content)

    def publish(self, _: Mapping[str, int]) -> None:
        """Make the folder the checkpoint."""
        publish(self.folder, self.final)

    def discard(self) -> None:
        """Delete the files of a failed save."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Unlock the folder. The system unlocks it too if it reports an error."""
        with suppress(OSError):
            self._lock.close()


class RemoteSave:
    """A save at a URL, with the methods of :class:`LocalSave`."""

    def __init__(self, final: RemotePath, token: int) -> None:
        self.final = self.folder = final
        self._token = token
        self._wrote_manifest = False

    def begin(self) -> None:
        """Do nothing: folders are parts of names."""

    def file_of(self, rank: int) -> RemotePath:
        """Return the file that a rank writes, under a name that no other save uses."""
        return self.folder / f"__{rank}_0-{self._token:016x}.distcp"

    @contextmanager
    def new_file(self, rank: int) -> Iterator[Any]:
        """Yield a stream to a rank's file, which appears after the block."""
        with self.file_of(rank).new_file() as stream:
            yield stream

    def write(self, name: str, content: bytes) -> None:
        """Upload torch's index, or then the manifest, which makes the files a checkpoint."""
        if name == MANIFEST_FILE and (self.final / name).exists():
            raise CheckpointingException(f"{self.final} was saved by another job at the same time")
        self._wrote_manifest = name == MANIFEST_FILE  # a failed upload may still have arrived
        with (self.folder / name).new_file() as stream:
            stream.write(content)

    def publish(self, sizes: Mapping[str, int]) -> None:
        """Raise if the storage has lost a file since."""
        for _, problem in size_problems(self.final, sizes):
            raise CheckpointingException(f"{problem} (the storage has lost it since)")

    def close(self) -> None:
        """Do nothing: storage at a URL has no locks."""

    def discard(self) -> None:
        """Delete the files of a failed save, as far as the storage responds."""
        with suppress(OSError):
            if self._wrote_manifest:
                (self.final / MANIFEST_FILE).remove()
            payloads = _filter_payloads(self.final.sizes())
            own = [name for name in payloads if name.endswith(f"-{self._token:016x}.distcp")]
            for name in own:
                (self.final / name).remove()
            if own == payloads:
                remove_leftovers(self.final)


def reserve(final: Place) -> None:
    """Raise if the place exists already, else make its parents. Removes leftovers at a URL."""
    if isinstance(final, RemotePath):
        remove_leftovers(final)
        exists = final.exists()
    else:
        exists = os.path.lexists(final)
    if exists:
        raise CheckpointingException(
            f"{final} already exists and is not overwritten. Choose another path, or delete it"
        )
    if not isinstance(final, RemotePath):
        make_directories(final.parent)


def remove_leftovers(folder: RemotePath) -> bool:
    """Delete the leftovers of an interrupted save or deletion at a URL. True if there were any."""
    names = folder.sizes()
    if MANIFEST_FILE in names:
        return False
    left = _filter_payloads(names)
    if METADATA_FILE in names:
        # Without payloads, only the mark distinguishes our index from one that torch wrote.
        metadata = folder / METADATA_FILE
        if left or OUR_MARK.encode() in metadata.read_range(0, metadata.size()):
            left = [METADATA_FILE, *left]
    for name in left:
        (folder / name).remove()
    return bool(left)


def _filter_payloads(names: Iterable[str]) -> list[str]:
    return [name for name in names if _REMOTE_PAYLOAD.fullmatch(name)]


@contextmanager
def _lock_folder(folder: Path, *, is_shared: bool) -> Iterator[None]:
    """Lock a folder, if the system can. BlockingIOError if another process has locked it.

    Only processes on this host see the lock. It ends with the process.
    """
    with ExitStack() as cleanup:
        try:
            import fcntl  # Windows has none

            cleanup.callback(os.close, descriptor := os.open(folder, os.O_RDONLY))
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except (ImportError, OSError) as error:
            logger.debug("%s cannot be locked: %s", folder, error)
        yield


def incomplete_sibling(path: Path, token: int) -> Path:
    """Return the hidden name, next to ``path``, under which its content is written."""
    return path.with_name(f".{path.name}.incomplete-{token:016x}")


def is_incomplete_name(name: str) -> bool:
    """Return whether :func:`incomplete_sibling` made a name."""
    return _INCOMPLETE.fullmatch(name) is not None


def sync_file(path: Path) -> None:
    """Wait until a file's content is on storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on storage, if the system has such a call."""
    if os.name == "nt":
        return
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and wait until its content is on storage."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def new_large_file(path: Path) -> BinaryIO:
    """Open a new file whose content is sent to storage while more of it is written.

    Otherwise the operating system keeps it in memory until the sync.
    """
    return io.BufferedWriter(_EarlyFlushedFile(path, "x"))


class _EarlyFlushedFile(io.FileIO):
    started = 0

    def write(self, content: ReadableBuffer) -> int:
        written = super().write(content)
        # A half page would block the next write.
        end = self.tell() // _AT_ONCE_BYTES * _AT_ONCE_BYTES
        if end > self.started and hasattr(os, "posix_fadvise"):
            # Allowing the kernel to drop pages makes it start to write them, without waiting.
            with suppress(OSError):
                os.posix_fadvise(
                    self.fileno(), self.started, end - self.started, os.POSIX_FADV_DONTNEED
                )
            self.started = end
        return written


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents, and sync each parent."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def publish(incomplete: Path, final: Path) -> None:
    """Rename a directory of synced files to its final name, in one step."""
    sync_directory(incomplete)
    try:
        incomplete.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise CheckpointingException(
            f"{final} was made by another program during the save, and is not overwritten"
        ) from error
    try:
        sync_directory(final.parent)
    except OSError as error:
        raise CheckpointingException(
            f"{final} is there and complete, but it is not yet known to be on the disk: its folder "
            f"cannot be synced ({describe_error(error)}). Do not delete older checkpoints before "
            "the storage is checked"
        ) from error


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
    matches = {entry: expression.fullmatch(entry.name) for entry in list_folders(root)}
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
    A save that a process on this host is still writing is left, with a warning. This does not hold
    for processes on other hosts, nor at a URL.

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
    removed: list[Place] = []
    for entry in list_folders(root):
        if isinstance(entry, RemotePath):
            removed += [entry] if remove_leftovers(entry) else []
        elif is_incomplete_name(entry.name):
            try:
                with _lock_folder(entry, is_shared=False):
                    shutil.rmtree(entry)
                removed.append(entry)
            except BlockingIOError:
                logger.warning("%s is not deleted: a process is still writing it", entry)
    return removed


def keep_last(
    root: PathLike, n: int, *, pattern: Pattern = CHECKPOINT_NAMES, protect: Iterable[PathLike] = ()
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
    folder = place_of(root)
    protected = {
        _resolve(folder / text if len(Path(text).parts) == 1 else place_of(text))
        for text in map(os.fsdecode, list_paths(protect))
    }
    surplus = [
        entry
        for entry in list_checkpoints(root, pattern=pattern)
        if _resolve(entry) not in protected
    ][:-n]
    for entry in surplus:
        _delete(entry)
    return surplus


def list_paths(given: PathLike | Iterable[PathLike]) -> list[PathLike]:
    """Return one path, or several, as a list."""
    return [given] if isinstance(given, str | bytes | os.PathLike) else list(given)


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
