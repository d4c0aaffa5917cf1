"""Where the elements of a tensor lie in an archive of torch.save."""

from __future__ import annotations

import struct
import zipfile
from pathlib import PurePosixPath
from typing import BinaryIO

from mcore.parallel.checkpoint.errors import describe_error
from mcore.parallel.checkpoint.file_slice import FileSlice

__all__ = ["archive_problem", "elements_at"]

_LOCAL_HEADER = struct.Struct("<26xHH")


def elements_at(stream: BinaryIO, offset: int, length: int, num_bytes: int) -> int | None:
    """Find the elements of a tensor in an archive that holds nothing else.

    Args:
        stream: A file.
        offset: Where the archive starts in it.
        length: How many bytes the archive has.
        num_bytes: How many bytes the elements have.

    Returns:
        Where the elements start in the file, or None when the archive is not laid out like this.
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
    """Compare the checksums in an archive with its content; None when all is well."""
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except Exception as error:
        return describe_error(error)
    return None if damaged is None else f"checksum of {damaged}"
