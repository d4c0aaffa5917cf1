"""Folders and files behind fsspec URLs, each error of which becomes one of the operating system's.

No filesystem is asked for what it listed before: other processes write to it too.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.archive import Seekable

# Of the first read; where reads follow each other, each fetches twice as much.
_FIRST_BYTES = 1 << 20
_MOST_BYTES = 1 << 25
_RANGE_BYTES = 1 << 23  # that are fetched at the same time as others
_PART_BYTES = 1 << 26  # of an upload; ten thousand of them are the most that S3 takes


class UnreachableError(OSError):
    """A storage did not answer or refused to, so that nobody knows what it holds."""


def is_unreachable(error: BaseException) -> bool:
    """Return whether an error comes from a storage that did not answer."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, UnreachableError):
        found = found.__cause__
    return found is not None


class RemotePath(os.PathLike[str]):
    """A place behind a URL, with the methods of ``pathlib.Path`` that checkpoints need.

    ``str()`` and ``os.fspath()`` give the URL.

    Example:
        >>> folder = remote_path("memory://runs/one")
        >>> str(folder / "step_1"), folder.name, (folder / "step_1").exists()
        ('memory://runs/one/step_1', 'one', False)
    """

    def __init__(self, filesystem: Any, url: str, key: str) -> None:
        self._filesystem, self._url, self._key = filesystem, url.rstrip("/"), key.rstrip("/")

    def __fspath__(self) -> str:
        return self._url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._filesystem, f"{self._url}/{name}", f"{self._key}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that this place is in."""
        url, key = self._url.rpartition("/")[0], self._key.rpartition("/")[0]
        return RemotePath(self._filesystem, url, key)

    def exists(self) -> bool:
        """Return whether there is a file, or a folder with files."""
        with self._named_errors():
            return bool(self._filesystem.exists(self._key))

    def is_dir(self) -> bool:
        """Return whether there is a folder with files."""
        with self._named_errors():
            return bool(self._filesystem.isdir(self._key))

    def is_file(self) -> bool:
        """Return whether there is a file."""
        with self._named_errors():
            return bool(self._filesystem.isfile(self._key))

    def size(self) -> int:
        """Return the bytes of a file; OSError for anything else."""
        with self._named_errors():
            found = self._filesystem.info(self._key)
        if found["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._url)
        return int(found["size"])

    def written_at_ns(self) -> int:
        """Return when a file was written; 0 where the filesystem does not know."""
        with suppress(Exception):
            return int(self._filesystem.modified(self._key).timestamp() * 1e9)
        return 0

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files directly in a folder, by name; none where it is missing."""
        return {one["name"]: int(one["size"]) for one in self._inside() if one["type"] == "file"}

    def folders(self) -> list[RemotePath]:
        """List the folders in a folder, by name."""
        names = [one["name"] for one in self._inside() if one["type"] == "directory"]
        return [self / name for name in sorted(names)]

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is in a folder."""
        return (self / one["name"] for one in self._inside())

    def open(self) -> io.RawIOBase:
        """Open a file to read."""
        return _RangeReader(self)

    def read_range(self, start: int, end: int) -> bytes:
        """Read some bytes of a file, parts of many at the same time."""
        starts = range(start, end, _RANGE_BYTES)
        ends = [min(first + _RANGE_BYTES, end) for first in starts]
        keys = [self._key] * len(ends)
        with self._named_errors():
            parts = self._filesystem.cat_ranges(keys, list(starts), ends, on_error="raise")
            for part in parts:
                if isinstance(part, Exception):  # which some filesystems do not raise
                    raise part
            return b"".join(parts)

    @contextmanager
    def new_file(self) -> Iterator[Any]:
        """Yield a stream to a file that is there, whole, once the block has ended without error."""
        with self._named_errors():
            stream = self._filesystem.open(self._key, "wb", block_size=_PART_BYTES)
            try:
                yield _Upload(stream)
            except BaseException:
                with suppress(Exception):
                    stream.discard()
                raise
            stream.close()

    def remove(self) -> None:
        """Delete a file; one that is gone is none."""
        with suppress(FileNotFoundError), self._named_errors():
            self._filesystem.rm_file(self._key)

    def remove_all(self) -> None:
        """Delete a folder and all in it."""
        with suppress(FileNotFoundError), self._named_errors():
            self._filesystem.rm(self._key, recursive=True)

    def rename(self, target: RemotePath) -> RemotePath:
        """Copy the files of a folder to another place and delete it here."""
        for name in self.sizes():
            with self._named_errors():
                self._filesystem.cp_file((self / name)._key, (target / name)._key)
        self.remove_all()
        return target

    def _inside(self) -> list[dict[str, Any]]:
        try:
            with self._named_errors():
                found = self._filesystem.ls(self._key, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        split = [(*one["name"].rstrip("/").rpartition("/"), one) for one in found]
        key = self._key.strip("/")
        return [{**one, "name": name} for folder, _, name, one in split if folder.strip("/") == key]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn errors of filesystems and their clients into OSErrors that name the URL."""
        try:
            yield
        except (CheckpointingException, UnreachableError):
            raise
        except FileNotFoundError as error:
            text = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, text, self._url) from error
        except NotADirectoryError:
            raise
        except Exception as error:
            raise UnreachableError(errno.EIO, describe_error(error), self._url) from error


class _Upload:
    """A stream to a file that takes no more at a time than it sends at a time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, content: bytes | memoryview) -> int:
        """Write bytes, which are sent or kept when it returns."""
        memory = memoryview(content).cast("B")
        for start in range(0, len(memory), _PART_BYTES):
            self._stream.write(memory[start : start + _PART_BYTES])
        return len(memory)


class _RangeReader(Seekable):
    """A file that is fetched in larger and larger blocks as long as it is read in order."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__(path.size())
        self._path = path
        self._block, self._block_at, self._block_bytes = b"", 0, _FIRST_BYTES

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")
        wanted = min(len(memory), self._length - self._position)
        if wanted <= 0:
            return 0
        if not 0 <= self._position - self._block_at < len(self._block):
            self._fetch(wanted)
        begin = self._position - self._block_at
        found = memoryview(self._block)[begin : begin + wanted]
        memory[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _fetch(self, wanted: int) -> None:
        follows = self._block and self._position == self._block_at + len(self._block)
        self._block_bytes = min(2 * self._block_bytes, _MOST_BYTES) if follows else _FIRST_BYTES
        end = min(self._position + max(wanted, self._block_bytes), self._length)
        self._block, self._block_at = self._path.read_range(self._position, end), self._position
        if not self._block:
            raise EOFError(f"{self._path} ends at byte {self._position}, not {self._length}")


def remote_path(url: str) -> RemotePath:
    """Return the place behind a URL; CheckpointingException where nothing here can reach it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise CheckpointingException(
            f"{url!r} is a URL, which needs the extra: pip install 'mcore-parallel[remote]', and "
            "the package for its kind of storage, such as s3fs"
        ) from error
    try:
        filesystem, key = url_to_fs(url, use_listings_cache=False)
    except Exception as error:
        raise CheckpointingException(
            f"{url!r} cannot be reached ({describe_error(error)}); install the package for its "
            "kind of storage beside mcore-parallel[remote], such as s3fs for s3://"
        ) from error
    return RemotePath(filesystem, url, str(key))
