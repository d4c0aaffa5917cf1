"""Writes that survive a crash: synced files and directories, and one rename that publishes."""

from __future__ import annotations

import errno
import io
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_AT_ONCE_BYTES = 1 << 24
_INCOMPLETE = re.compile(r"\..+\.incomplete-[0-9a-f]{16}", re.S)


def incomplete_sibling(path: Path, token: int) -> Path:
    """Return the name beside ``path`` under which its content is made."""
    return path.with_name(f".{path.name}.incomplete-{token:016x}")


def is_incomplete_name(name: str) -> bool:
    """Return whether a name is one of :func:`incomplete_sibling`."""
    return _INCOMPLETE.fullmatch(name) is not None


def sync_file(path: Path) -> None:
    """Wait until a file's content is on storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on storage; on Windows there is no such call."""
    if os.name != "nt":
        sync_file(path)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and wait until its content is on storage."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def new_large_file(path: Path) -> BinaryIO:
    """Open a new file, whose content is on its way to storage while more of it is written.

    Otherwise the operating system keeps it in memory until the sync.
    """
    return io.BufferedWriter(_StartedEarly(path, "x"))


class _StartedEarly(io.FileIO):
    started = 0

    def write(self, content: ReadableBuffer) -> int:
        written = super().write(content)
        end = self.tell() // _AT_ONCE_BYTES * _AT_ONCE_BYTES  # the next write waits for a half page
        if end > self.started and hasattr(os, "posix_fadvise"):
            # Saying that memory may be dropped starts writing it, without waiting.
            with suppress(OSError):
                os.posix_fadvise(
                    self.fileno(), self.started, end - self.started, os.POSIX_FADV_DONTNEED
                )
            self.started = end
        return written


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents, each durably named in its own parent."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def publish(incomplete: Path, final: Path) -> None:
    """Give a directory of synced files its final name, in one step that a crash cannot split."""
    sync_directory(incomplete)
    incomplete.rename(final)
    sync_directory(final.parent)
