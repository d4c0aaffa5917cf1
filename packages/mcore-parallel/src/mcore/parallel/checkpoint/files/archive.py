"""Archives of ``torch.save`` inside larger files: their checksums and the place of elements."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import PurePosixPath
from typing import BinaryIO

from mcore.parallel.checkpoint.errors import describe_error

_LOCAL_HEADER = struct.Struct("<26xHH")


class FileSlice(io.RawIOBase):
    """A read-only, seekable view of some bytes of an open file, which must outlive it."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._stream, self._offset, self._length = stream, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset} in a slice of a file")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(self._offset + self._position)
        content = self._stream.read(wanted)
        self._position += len(content)
        return content


def elements_at(stream: BinaryIO, offset: int, length: int, num_bytes: int) -> int | None:
    """Return where in a file the elements of the only tensor in an archive start.

    None when the archive is not laid out like this, or the tensor does not have ``num_bytes``.
    """
    with zipfile.ZipFile(FileSlice(stream, offset, length)) as archive:
        records = [
            info
            for info in archive.infolist()
            if PurePosixPath(info.filename).parent.name == "data"
        ]
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        return None
    if records[0].file_size != num_bytes:
        return None
    header = offset + records[0].header_offset
    stream.seek(header)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return header + int(_LOCAL_HEADER.size) + int(name_bytes) + int(extra_bytes)


def archive_problem(stream: FileSlice) -> str | None:
    """Compare the checksums in an archive with its content; None when they match."""
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except Exception as error:
        return describe_error(error)
    return None if damaged is None else f"checksum of {damaged}"
