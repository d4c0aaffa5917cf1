"""Files opened for writing. No link in a run folder leads a write to a file elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["open_plain", "replacing"]

# Windows has none of the first three.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_PROBLEM = "it is a link, has a second name, or is no file: replace it by a plain file"


def open_plain(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file and return its descriptor. It may be the ``opener`` of :func:`open`.

    Modes with "w" truncate a second name of a file before it is refused: use "x" or "a".

    Args:
        path: The file. The folders of its path may be links.
        flags: As for :func:`os.open`.
        mode: The permissions of a new file, less the umask.

    Raises:
        OSError: The file is a link, a pipe, a folder, or has a second name, or cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lines"
        >>> with open(path, "a", opener=open_plain) as file:
        ...     file.write("1")
        1
        >>> (path.parent / "link").symlink_to(path)
        >>> open_plain(path.parent / "link", os.O_WRONLY)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        OSError: [Errno ...] it is a link, has a second name, or is no file: replace it ...
    """
    if os.path.islink(path):  # a clear message, and all that Windows can do
        raise OSError(errno.ELOOP, _PROBLEM, os.fspath(path))
    descriptor = os.open(path, flags | _FLAGS, mode)
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink < 2:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ELOOP, _PROBLEM, os.fspath(path))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces ``path`` at the end of the block.

    After an error the new file is deleted, and ``path`` keeps its content. A link at ``path`` is
    replaced, not followed.

    Args:
        path: The file.
        mode: The permissions of the new file, less the umask.

    Raises:
        OSError: The folder cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "facts"
        >>> with replacing(path) as file:
        ...     file.write(b"new")
        3
        >>> path.read_text()
        'new'
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        # Creation with O_EXCL, the "x", follows no link on any system.
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
