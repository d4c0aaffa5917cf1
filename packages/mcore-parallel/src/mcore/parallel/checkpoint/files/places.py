"""Places of checkpoints: local paths, of which only regular files are opened, and fsspec URLs.

Listings of a remote filesystem are never cached: other processes write to it too. Each error of a
filesystem or its client becomes an OSError.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Union

from mcore.parallel.checkpoint import errors
from mcore.parallel.checkpoint.files.pieces import Seekable

PathLike = str | bytes | os.PathLike[str]
Place = Union[Path, "RemotePath"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[:/]")  # a drive of Windows has one letter
_WHOLE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?::|//)")
_FILE_URL = re.compile(r"(?:file|local)://(?=/)")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

# The first read is this long. While reads follow each other, each fetches twice as much.
_FIRST_BYTES = 1 << 20
_MOST_BYTES = 1 << 25
_RANGE_BYTES = 1 << 23  # per concurrent request
_PART_BYTES = 1 << 26  # of an upload, of which S3 accepts 10,000


def place_of(path: PathLike) -> Place:
    """Return an absolute path with its ``~`` expanded, or the place of an fsspec URL."""
    if isinstance(path, RemotePath):
        return path
    text = _FILE_URL.sub("", os.fsdecode(path))
    if not _URL.match(text):
        return local_path(text)
    if not _WHOLE_URL.match(text):
        raise errors.CheckpointingException(
            f"{text!r} is a URL that lacks a slash, which pathlib.Path removes. Give a str such as "
            f"{text.replace(':/', '://', 1)!r}"
        )
    return remote_path(text)


def local_path(path: PathLike) -> Path:
    """Return an absolute path with its ``~`` expanded, or raise for a URL."""
    text = os.fsdecode(path)
    if _URL.match(text):
        raise errors.CheckpointingException(
            f"{text!r} is a URL, but a path of a mounted file system is expected"
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise errors.CheckpointingException(
            f"{text!r} names the home of an unknown user. Write './{text}' for a directory of "
            "that name"
        )
    return Path(os.path.abspath(expanded))


def list_folders(root: PathLike) -> list[Place]:
    """List the folders in a folder, by name, without links to folders. It may be missing."""
    folder = place_of(root)
    if isinstance(folder, RemotePath):
        return [*folder.folders()]
    if not folder.is_dir():
        return []
    given = Path(os.path.expanduser(_FILE_URL.sub("", os.fsdecode(root))))
    entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    return [given / entry.name for entry in sorted(entries, key=lambda one: one.name)]


def open_regular(path: Place) -> io.RawIOBase:
    """Open a regular file for reading. A FIFO never blocks the call.

    Raises CheckpointingException, with the path, for a missing file or anything but a regular file.
    """
    try:
        if isinstance(path, RemotePath):
            return path.open()
        _read_size(path)  # before the open: opening a device can have an effect
        stream = io.FileIO(os.open(path, _OPEN_FLAGS | getattr(os, "O_CLOEXEC", 0)), "rb")
    except OSError as error:
        cause = without_damage(path, error)
        text = f"{path} cannot be read ({error.strerror or error}{_note_link(path)})"
        raise errors.CheckpointingException(text + hint_at_another(cause)) from cause
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise errors.CheckpointingException(
            f"{path} is not a regular file. Take another checkpoint"
        )
    if hasattr(os, "posix_fadvise"):  # doubles the read-ahead of the kernel
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return stream


def read_regular(path: Place, beginning: bytes) -> bytes:
    """Read a regular file. Raise, without reading it whole, unless it starts with ``beginning``."""
    with open_regular(path) as stream:
        try:
            content = stream.read(len(beginning)) or b""
            if content != beginning:
                raise errors.CheckpointingException(
                    f"{path} has changed since it was saved, or another program wrote it: it "
                    f"begins with {content!r}, not {beginning!r}. Take another checkpoint"
                )
            stream.seek(0)
            return stream.readall() or b""
        except (OSError, EOFError, MemoryError) as error:
            cause = without_damage(path, error)
            raise errors.CheckpointingException(
                f"{path} cannot be read ({errors.describe_error(error)}){hint_at_another(cause)}"
            ) from cause


def size_problems(
    directory: Place, sizes: Mapping[str, int], *, at_least: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that is missing or has another size, and the problem."""
    if isinstance(directory, RemotePath):
        found = directory.sizes()  # one request for all files
        sizes = {name: size for name, size in sizes.items() if found.get(name) != size}
    for name, size in sizes.items():
        problem = size_problem(directory / name, size, at_least=at_least)
        if problem is not None:
            yield name, problem


def size_problem(path: Place, expected: int, *, at_least: bool = False) -> str | None:
    """Return the problem with a file or its size, with the file's name, or None."""
    try:
        found = _read_size(path)
    except OSError as error:
        if not errors.is_lasting(error) and without_damage(path, error) is not None:
            raise
        return f"{path} cannot be read ({error.strerror}{_note_link(path)})"
    except errors.CheckpointingException as error:
        return str(error)
    if found == expected or (at_least and found > expected):
        return None
    return f"{path} has {found} bytes but {expected} were saved: it is truncated or was changed"


def without_damage(path: Place, error: BaseException) -> BaseException | None:
    """Return the error of a read, or None if reading the local file again fails in the same way.

    Only an error of the input that stays is damage. None as a cause marks it.
    """
    if not isinstance(error, OSError) or error.errno != errno.EIO or isinstance(path, RemotePath):
        return error
    try:
        with open(path, "rb", buffering=0) as stream:
            while stream.read(_FIRST_BYTES):
                pass
    except OSError as again:
        return None if again.errno == errno.EIO else error
    return error


def hint_at_another(cause: BaseException | None) -> str:
    """Return the advice at the end of a text, unless the cause of a failed read may pass."""
    passes = cause is not None and errors.find_passing(cause) is not None
    return "" if passes else ". Take another checkpoint"


def _read_size(path: Place) -> int:
    if isinstance(path, RemotePath):
        return path.size()
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise errors.CheckpointingException(f"{path} is {kind} and not a regular file")
    return status.st_size


def _note_link(path: Place) -> str:
    is_link = isinstance(path, Path) and path.is_symlink()
    return ", though there is a link of that name" if is_link else ""


class RemotePath(os.PathLike[str]):
    """The place of a URL, with the methods of ``pathlib.Path`` that checkpoints need.

    ``str()`` and ``os.fspath()`` return the URL.

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
        with self._name_errors():
            return bool(self._filesystem.exists(self._key))

    def is_dir(self) -> bool:
        """Return whether there is a folder with files."""
        with self._name_errors():
            return bool(self._filesystem.isdir(self._key))

    def is_file(self) -> bool:
        """Return whether there is a file."""
        with self._name_errors():
            return bool(self._filesystem.isfile(self._key))

    def size(self) -> int:
        """Return the bytes of a file. Anything else is an OSError."""
        with self._name_errors():
            found = self._filesystem.info(self._key)
        if found["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._url)
        return int(found["size"])

    def written_at_ns(self) -> int:
        """Return when a file was written, or 0 if the filesystem does not record it."""
        with suppress(Exception):
            return int(self._filesystem.modified(self._key).timestamp() * 1e9)
        return 0

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files directly in a folder, by name. It may be missing."""
        return {
            one["name"]: int(one["size"]) for one in self._list_inside() if one["type"] == "file"
        }

    def folders(self) -> list[RemotePath]:
        """List the folders in a folder, by name."""
        names = [one["name"] for one in self._list_inside() if one["type"] == "directory"]
        return [self / name for name in sorted(names)]

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the files and folders directly in a folder."""
        return (self / one["name"] for one in self._list_inside())

    def open(self) -> io.RawIOBase:
        """Open a file for reading."""
        return _RangeReader(self)

    def read_range(self, start: int, end: int) -> bytes:
        """Read some bytes of a file, in several requests at a time if there are many."""
        starts = range(start, end, _RANGE_BYTES)
        ends = [min(first + _RANGE_BYTES, end) for first in starts]
        keys = [self._key] * len(ends)
        with self._name_errors():
            parts = self._filesystem.cat_ranges(keys, list(starts), ends, on_error="raise")
            for part in parts:
                if isinstance(part, Exception):  # some filesystems return it
                    raise part
            return b"".join(parts)

    @contextmanager
    def new_file(self) -> Iterator[Any]:
        """Yield a stream to a file. The file appears, whole, if the block ends without an error."""
        with self._name_errors():
            stream = self._filesystem.open(self._key, "wb", block_size=_PART_BYTES)
            try:
                yield _Upload(stream)
            except BaseException:
                with suppress(Exception):
                    stream.discard()
                raise
            stream.close()

    def remove(self) -> None:
        """Delete a file, which may be missing."""
        with suppress(FileNotFoundError), self._name_errors():
            self._filesystem.rm_file(self._key)

    def remove_all(self) -> None:
        """Delete a folder and its content."""
        with suppress(FileNotFoundError), self._name_errors():
            self._filesystem.rm(self._key, recursive=True)

    def rename(self, target: RemotePath) -> RemotePath:
        """Copy the files of a folder to another place and delete it here."""
        for name in self.sizes():
            with self._name_errors():
                self._filesystem.cp_file((self / name)._key, (target / name)._key)
        self.remove_all()
        return target

    def _list_inside(self) -> list[dict[str, Any]]:
        try:
            with self._name_errors():
                found = self._filesystem.ls(self._key, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        split = [(*one["name"].rstrip("/").rpartition("/"), one) for one in found]
        key = self._key.strip("/")
        return [{**one, "name": name} for folder, _, name, one in split if folder.strip("/") == key]

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Turn errors of filesystems and their clients into OSErrors that name the URL."""
        try:
            yield
        except (errors.CheckpointingException, errors.UnreachableError):
            raise
        except FileNotFoundError as error:
            text = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, text, self._url) from error
        except NotADirectoryError:
            raise
        except Exception as error:
            raise errors.UnreachableError(
                errno.EIO, errors.describe_error(error), self._url
            ) from error


class _Upload:
    """A stream to a file that is written in pieces of the size of an upload's parts."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, content: bytes | memoryview) -> int:
        """Write bytes. They are sent or copied before this returns."""
        memory = memoryview(content).cast("B")
        for start in range(0, len(memory), _PART_BYTES):
            self._stream.write(memory[start : start + _PART_BYTES])
        return len(memory)


class _RangeReader(Seekable):
    """A file that is fetched in blocks, which grow while it is read in order."""

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
            follows = self._block and self._position == self._block_at + len(self._block)
            doubled = min(2 * self._block_bytes, _MOST_BYTES)
            self._block_bytes = doubled if follows else _FIRST_BYTES
            end = min(self._position + max(wanted, self._block_bytes), self._length)
            self._block_at = self._position
            self._block = self._path.read_range(self._position, end)
            if not self._block:
                raise EOFError(f"{self._path} ends at byte {self._position}, not {self._length}")
        begin = self._position - self._block_at
        found = memoryview(self._block)[begin : begin + wanted]
        memory[: len(found)] = found
        self._position += len(found)
        return len(found)


def remote_path(url: str) -> RemotePath:
    """Return the place of a URL, or raise CheckpointingException if it cannot be reached."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise errors.CheckpointingException(
            f"{url!r} is a URL and needs an extra: pip install 'mcore-parallel[remote]' and the "
            "package for its kind of storage, such as s3fs"
        ) from error
    try:
        filesystem, key = url_to_fs(url, use_listings_cache=False)
    except Exception as error:
        raise errors.CheckpointingException(
            f"{url!r} cannot be reached ({errors.describe_error(error)}). Install "
            "mcore-parallel[remote] and the package for its kind of storage, such as s3fs for s3://"
        ) from error
    return RemotePath(filesystem, url, str(key))
