"""Where the files of a save are written, and how they become a checkpoint in one step.

On a mounted file system, the files are written into a hidden folder, which one rename makes the
checkpoint. At a URL nothing can be renamed in one step. There the files are written into the final
folder, under names that no other save uses, and the manifest that lists them is written last.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.index import OUR_MARK
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE
from mcore.parallel.checkpoint.files.places import Place, RemotePath, size_problems
from mcore.parallel.torch_compat import METADATA_FILE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# The errors of file systems without a sync of directories.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_ONCE_BYTES = 1 << 24
_INCOMPLETE = re.compile(r"\..+\.incomplete-[0-9a-f]{16}", re.S)
_REMOTE_PAYLOAD = re.compile(r"__\d+_0-[0-9a-f]{16}\.distcp")


class LocalSave:
    """A save in a hidden folder next to its final place. Each method syncs its changes."""

    def __init__(self, final: Path, token: int) -> None:
        self.final, self.folder = final, incomplete_sibling(final, token)

    def begin(self) -> None:
        """Make the folder on every rank: shared file systems show it late to other hosts."""
        self.folder.mkdir(exist_ok=True)

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

    def write_index(self, index: bytes) -> None:
        """Write torch's index."""
        write_file(self.folder / METADATA_FILE, index)

    def write_manifest(self, manifest: bytes) -> None:
        """Write the manifest of files that are on storage."""
        write_file(self.folder / MANIFEST_FILE, manifest)

    def publish(self, _: Mapping[str, int]) -> None:
        """Make the folder the checkpoint."""
        publish(self.folder, self.final)

    def discard(self) -> None:
        """Delete the files of a failed save."""
        shutil.rmtree(self.folder, ignore_errors=True)


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

    def write_index(self, index: bytes) -> None:
        """Upload torch's index."""
        self._write(METADATA_FILE, index)

    def write_manifest(self, manifest: bytes) -> None:
        """Write the manifest, which makes the files a checkpoint."""
        if (self.final / MANIFEST_FILE).exists():
            raise CheckpointingException(f"{self.final} was saved by another job at the same time")
        self._wrote_manifest = True  # an upload that fails may still have arrived
        self._write(MANIFEST_FILE, manifest)

    def publish(self, sizes: Mapping[str, int]) -> None:
        """Raise if the storage has lost a file since."""
        for _, problem in size_problems(self.final, sizes):
            raise CheckpointingException(f"{problem} (the storage has lost it since)")

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

    def _write(self, name: str, content: bytes) -> None:
        with (self.folder / name).new_file() as stream:
            stream.write(content)


def save_at(final: Place, token: int) -> LocalSave | RemoteSave:
    """Return the save that makes the checkpoint at a place."""
    if isinstance(final, RemotePath):
        return RemoteSave(final, token)
    return LocalSave(final, token)


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
        end = (
            self.tell() // _AT_ONCE_BYTES * _AT_ONCE_BYTES
        )  # a half page would block the next write
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
