"""Places of checkpoints, and files that are opened only where they are regular ones."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.remote import RemotePath, remote_path

PathLike = str | os.PathLike[str]
Place = Path | RemotePath

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


def place_of(path: PathLike) -> Place:
    """Return an absolute path with its ``~`` expanded, or the place behind a URL of fsspec."""
    if isinstance(path, RemotePath):
        return path
    text = _FILE_URL.sub("", os.fspath(path))
    if not _URL.match(text):
        return local_path(text)
    if not _WHOLE_URL.match(text):
        raise CheckpointingException(
            f"{text!r} lacks a slash of a URL, as pathlib.Path leaves it; give a str such as "
            f"{text.replace(':/', '://', 1)!r}"
        )
    return remote_path(text)


def local_path(path: PathLike) -> Path:
    """Return an absolute path with its ``~`` expanded; CheckpointingException for a URL."""
    text = os.fspath(path)
    if _URL.match(text):
        raise CheckpointingException(
            f"{text!r} is a URL; give a directory of a file system that is mounted here"
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise CheckpointingException(
            f"{text!r} names the home of an unknown user; write './{text}' for a directory of "
            "that name"
        )
    return Path(os.path.abspath(expanded))


def open_regular(path: Place) -> io.RawIOBase:
    """Open a regular file to read, without waiting for whoever writes to a FIFO.

    Raises CheckpointingException that names anything else, also what is missing.
    """
    try:
        if isinstance(path, RemotePath):
            return path.open()
        _regular_size(path)  # before the open: that of a device may do something
        stream = io.FileIO(os.open(path, _OPEN_FLAGS | getattr(os, "O_CLOEXEC", 0)), "rb")
    except OSError as error:
        raise CheckpointingException(
            f"{path} cannot be read ({error.strerror}{_link_note(path)}); take another checkpoint"
        ) from error
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise CheckpointingException(f"{path} is not a regular file; take another checkpoint")
    if hasattr(os, "posix_fadvise"):  # the system reads twice as far ahead
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return stream


def read_regular(path: Place, beginning: bytes) -> bytes:
    """Read a regular file that must begin like this; one that does not is not read further."""
    with open_regular(path) as stream:
        try:
            content = stream.read(len(beginning)) or b""
            if content != beginning:
                raise CheckpointingException(
                    f"{path} has changed since it was saved, or something else wrote it: it begins "
                    f"with {content!r}, not {beginning!r}; take another checkpoint"
                )
            stream.seek(0)
            return stream.readall() or b""
        except (OSError, EOFError, MemoryError) as error:
            raise CheckpointingException(
                f"{path} cannot be read ({error}); take another checkpoint"
            ) from error


def size_problems(
    directory: Place, sizes: Mapping[str, int], *, at_least: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the files, of those with these sizes, with which something is wrong, and what."""
    if isinstance(directory, RemotePath):
        found = directory.sizes()  # one request instead of one for each file
        sizes = {name: size for name, size in sizes.items() if found.get(name) != size}
    for name, size in sizes.items():
        problem = size_problem(directory / name, size, at_least=at_least)
        if problem is not None:
            yield name, problem


def size_problem(path: Place, expected: int, *, at_least: bool = False) -> str | None:
    """Return what is wrong with a file or its size, with the file's name, or None."""
    try:
        found = _regular_size(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}{_link_note(path)})"
    except CheckpointingException as error:
        return str(error)
    if found == expected or (at_least and found > expected):
        return None
    return f"{path} has {found} bytes but {expected} were saved: it is truncated or was changed"


def _regular_size(path: Place) -> int:
    if isinstance(path, RemotePath):
        return path.size()
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointingException(f"{path} is {kind} and not a regular file")
    return status.st_size


def _link_note(path: Place) -> str:
    is_link = isinstance(path, Path) and path.is_symlink()
    return ", though there is a link of that name" if is_link else ""
