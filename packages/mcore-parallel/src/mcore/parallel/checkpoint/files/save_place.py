"""Where the files of a save are made, and how they become a checkpoint all at once.

On a file system that is mounted here it is the rename of a hidden folder. Behind a URL nothing can
be renamed at once: the files lie in the folder itself, under names that no other save uses, and the
manifest that lists them is written last.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.durable_files import (
    incomplete_sibling,
    make_directories,
    new_large_file,
    publish,
    sync_directory,
    sync_file,
    write_file,
)
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE
from mcore.parallel.checkpoint.files.metadata_file import OUR_MARK
from mcore.parallel.checkpoint.files.regular_files import Place, size_problems
from mcore.parallel.checkpoint.files.remote import RemotePath
from mcore.parallel.torch_compat import METADATA_FILE

_REMOTE_PAYLOAD = re.compile(r"__\d+_0-[0-9a-f]{16}\.distcp")


class LocalSave:
    """A save in a hidden folder beside its final place, all of whose methods leave it durable."""

    def __init__(self, final: Path, token: int) -> None:
        self.final, self.folder = final, incomplete_sibling(final, token)

    def begin(self) -> None:
        """Make the folder, on every rank: one may see it only after another has made it."""
        self.folder.mkdir(exist_ok=True)

    def file_of(self, rank: int) -> Path:
        """Return the file that a rank writes."""
        return self.folder / f"__{rank}_0.distcp"

    @contextmanager
    def new_file(self, rank: int) -> Iterator[Any]:
        """Yield a stream to a rank's file, which is on storage when the block has ended."""
        with new_large_file(self.file_of(rank)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        sync_directory(self.folder)

    def write_index(self, write: Callable[[Path], None]) -> bytes:
        """Have torch's index written into a folder, and return its content."""
        write(self.folder)
        sync_file(self.folder / METADATA_FILE)
        return (self.folder / METADATA_FILE).read_bytes()

    def write_manifest(self, manifest: bytes) -> None:
        """Write the manifest of files that are on storage."""
        write_file(self.folder / MANIFEST_FILE, manifest)

    def publish(self, _: Mapping[str, int]) -> None:
        """Make the folder the checkpoint."""
        publish(self.folder, self.final)

    def discard(self) -> None:
        """Delete what a save that failed has written."""
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteSave:
    """A save behind a URL, with the methods of :class:`LocalSave`."""

    def __init__(self, final: RemotePath, token: int) -> None:
        self.final = self.folder = final
        self._token = token
        self._wrote_manifest = False

    def begin(self) -> None:
        """Do nothing: folders are parts of names."""

    def file_of(self, rank: int) -> RemotePath:
        """Return the file that a rank writes; one of another save never has its name."""
        return self.folder / f"__{rank}_0-{self._token:016x}.distcp"

    @contextmanager
    def new_file(self, rank: int) -> Iterator[Any]:
        """Yield a stream to a rank's file, which is there when the block has ended."""
        with self.file_of(rank).new_file() as stream:
            yield stream

    def write_index(self, write: Callable[[Path], None]) -> bytes:
        """Have torch's index written, and return its content."""
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            content = (Path(folder) / METADATA_FILE).read_bytes()
        self._write(METADATA_FILE, content)
        return content

    def write_manifest(self, manifest: bytes) -> None:
        """Write the manifest, which makes the files a checkpoint."""
        if (self.final / MANIFEST_FILE).exists():
            raise CheckpointingException(f"{self.final} was saved by another job meanwhile")
        self._wrote_manifest = True  # perhaps even where an error follows
        self._write(MANIFEST_FILE, manifest)

    def publish(self, sizes: Mapping[str, int]) -> None:
        """Make sure that the storage has lost nothing in the meantime."""
        for _, problem in size_problems(self.final, sizes):
            raise CheckpointingException(f"{problem} (the storage has lost it since)")

    def discard(self) -> None:
        """Delete what a save that failed has written, as far as the storage answers."""
        with suppress(OSError):
            if self._wrote_manifest:
                (self.final / MANIFEST_FILE).remove()
            payloads = _payloads(self.final.sizes())
            own = [name for name in payloads if name.endswith(f"-{self._token:016x}.distcp")]
            for name in own:
                (self.final / name).remove()
            if own == payloads:
                remove_leftovers(self.final)

    def _write(self, name: str, content: bytes) -> None:
        with (self.folder / name).new_file() as stream:
            stream.write(content)


def save_at(final: Place, token: int) -> LocalSave | RemoteSave:
    """Return the save that makes a checkpoint of a place."""
    if isinstance(final, RemotePath):
        return RemoteSave(final, token)
    return LocalSave(final, token)


def reserve(final: Place) -> None:
    """Raise where something exists already; make parents, and remove what a failed save left."""
    if isinstance(final, RemotePath):
        remove_leftovers(final)
        exists = final.exists()
    else:
        exists = os.path.lexists(final)
    if exists:
        raise CheckpointingException(
            f"{final} already exists and is left as it is; choose another path, or delete it"
        )
    if not isinstance(final, RemotePath):
        make_directories(final.parent)


def remove_leftovers(folder: RemotePath) -> bool:
    """Delete what an interrupted save or deletion left behind a URL; return whether it did."""
    names = folder.sizes()
    if MANIFEST_FILE in names:
        return False
    left = _payloads(names)
    if METADATA_FILE in names and (left or _has_our_mark(folder / METADATA_FILE)):
        left = [METADATA_FILE, *left]
    for name in left:
        (folder / name).remove()
    return bool(left)


def _payloads(names: Iterable[str]) -> list[str]:
    return [name for name in names if _REMOTE_PAYLOAD.fullmatch(name)]


def _has_our_mark(metadata: RemotePath) -> bool:
    return OUR_MARK.encode() in metadata.read_range(0, metadata.size())
