"""Paths on this machine, and files that are opened only where they are regular ones."""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path

from mcore.parallel.checkpoint.errors import CheckpointingException

PathLike = str | os.PathLike[str]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a drive of Windows has one letter
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


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


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file to read, without waiting for whoever writes to a FIFO.

    Raises CheckpointingException that names anything else, also what is missing.
    """
    try:
        _regular_size(path)  # before the open: that of a device may do something
        stream = io.FileIO(os.open(path, _OPEN_FLAGS | getattr(os, "O_CLOEXEC", 0)), "rb")
    except OSError as error:
        raise CheckpointingException(
            f"{path} cannot be read ({error.strerror}{_link_note(path)}); take another checkpoint"
        ) from error
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise CheckpointingException(f"{path} is not a regular file; take another checkpoint")
    return stream


def read_regular(path: Path, beginning: bytes) -> bytes:
    """Read a regular file that must begin like this; one that does not is not read further."""
    with open_regular(path) as stream:
        try:
            content = stream.read(len(beginning))
            if content != beginning:
                raise CheckpointingException(
                    f"{path} has changed since it was saved, or something else wrote it: it begins "
                    f"with {content!r}, not {beginning!r}; take another checkpoint"
                )
            stream.seek(0)
            return stream.readall()
        except (OSError, MemoryError) as error:
            raise CheckpointingException(
                f"{path} cannot be read ({error}); take another checkpoint"
            ) from error


def size_problem(path: Path, expected: int, *, at_least: bool = False) -> str | None:
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


def _regular_size(path: Path) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointingException(f"{path} is {kind} and not a regular file")
    return status.st_size


def _link_note(path: Path) -> str:
    return ", though there is a link of that name" if path.is_symlink() else ""
