"""A part of a file as a file of its own."""

from __future__ import annotations

import io
import os
from typing import BinaryIO

__all__ = ["FileSlice"]


class FileSlice(io.RawIOBase):
    """A read-only, seekable view of some bytes of an open file, which must outlive it.

    Args:
        stream: The file.
        offset: Where the slice starts, in bytes.
        length: Its length in bytes.

    Example:
        >>> FileSlice(io.BytesIO(b"abcdef"), 2, 3).read()
        b'cde'
    """

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._stream, self._offset, self._length = stream, offset, length
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Return the position in the slice."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the slice; ValueError before its start."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset} in a slice of a file")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return up to ``size`` bytes, or all up to the end of the slice."""
        left = max(0, self._length - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(self._offset + self._position)
        content = self._stream.read(wanted)
        self._position += len(content)
        return content
