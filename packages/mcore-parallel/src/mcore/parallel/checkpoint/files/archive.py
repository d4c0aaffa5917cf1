"""Archives of ``torch.save`` inside larger files: how they are written, where elements lie."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from mcore.parallel.checkpoint.errors import describe_error
from mcore.parallel.tensor_memory import memory_of

_SMALL_BYTES = 1 << 20  # torch.save takes as long for a few bytes as for a quarter of a megabyte
_SMALL_PICKLE_BYTES = 1 << 12
_LOCAL_HEADER = struct.Struct("<26xHH")
_CRC_IN_DIRECTORY, _NAME_IN_DIRECTORY = 16, 46


Readable = BinaryIO | io.RawIOBase


class Seekable(io.RawIOBase):
    """A position in a read-only file of known length; subclasses read from there on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._position = length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}, before the start of a file")
        self._position = base + offset
        return self._position


class FileSlice(Seekable):
    """A read-only, seekable view of some bytes of an open file, which must outlive it."""

    def __init__(self, stream: Readable, offset: int, length: int) -> None:
        super().__init__(length)
        self._stream, self._offset = stream, offset

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(self._offset + self._position)
        content = self._stream.read(wanted)
        self._position += len(content)
        return content


def write_tensor(stream: Any, tensor: torch.Tensor) -> int:
    """Write a contiguous CPU tensor, alone in its storage, as ``torch.save`` does.

    Returns how many bytes precede its elements. ``stream`` has ``write``, ``tell`` and ``flush``.
    """
    if tensor.nbytes <= _SMALL_BYTES:
        template = _template(tensor.dtype, tuple(tensor.shape))
        stream.write(template.filled(memory_of(tensor)))
        return len(template.head)
    finder = _ElementsFinder(stream, tensor.nbytes)
    torch.save(tensor, cast("BinaryIO", finder))
    return finder.found_at()


class _ElementsFinder:
    """A stream that notes where the only write of so many bytes begins."""

    def __init__(self, stream: Any, num_bytes: int) -> None:
        self._write, self.flush = stream.write, stream.flush
        self._num_bytes, self._position = num_bytes, 0
        self._found: list[int] = []

    def write(self, content: memoryview) -> int:
        """Pass bytes on."""
        if len(content) == self._num_bytes:
            self._found.append(self._position)
        self._position += len(content)
        self._write(content)
        return len(content)

    def found_at(self) -> int:
        """Return how many bytes came before."""
        if len(self._found) != 1:
            raise RuntimeError("this version of torch.save does not write elements in one piece")
        return self._found[0]


class _Template(NamedTuple):
    """An archive of a tensor without its elements, and where their CRC-32 stands after them."""

    head: bytes
    tail: bytes
    crc_places: tuple[int, ...]

    def filled(self, elements: memoryview) -> bytes:
        """Return the archive of these elements."""
        tail, crc = bytearray(self.tail), struct.pack("<I", zlib.crc32(elements))
        for place in self.crc_places:
            tail[place : place + 4] = crc
        return b"".join((self.head, elements, tail))


@lru_cache(maxsize=64)
def _template(dtype: torch.dtype, shape: tuple[int, ...]) -> _Template:
    sample, stream = torch.empty(shape, dtype=dtype, device="cpu"), io.BytesIO()
    if not sample.nbytes:
        torch.save(sample, stream)
        return _Template(stream.getvalue(), b"", ())
    memory_of(sample)[:] = bytes(sample.nbytes)
    torch.save(sample, stream)
    content = stream.getvalue()
    at = elements_at(stream, 0, len(content), sample.nbytes)
    if at is None:
        raise RuntimeError("this version of torch.save does not write elements in one piece")
    tail, crc = content[at + sample.nbytes :], struct.pack("<I", zlib.crc32(memory_of(sample)))
    with zipfile.ZipFile(stream) as archive:
        [record] = _data_records(archive)
    name = record.filename.encode()
    # Once in what follows the elements, and once in the directory of the archive.
    places = (4, tail.index(name) - _NAME_IN_DIRECTORY + _CRC_IN_DIRECTORY)
    if any(tail[place : place + 4] != crc for place in places):
        raise RuntimeError("this version of torch.save lays out archives in another way")
    return _Template(content[:at], tail, places)


def _data_records(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [
        info for info in archive.infolist() if PurePosixPath(info.filename).parent.name == "data"
    ]


def elements_at(stream: Readable, offset: int, length: int, num_bytes: int) -> int | None:
    """Return where in a file the elements of the only tensor in an archive start.

    None when the archive is not laid out like this, or the tensor does not have ``num_bytes``.
    """
    with zipfile.ZipFile(FileSlice(stream, offset, length)) as archive:
        records = _data_records(archive)
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        return None
    if records[0].file_size != num_bytes:
        return None
    header = offset + records[0].header_offset
    stream.seek(header)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return header + int(_LOCAL_HEADER.size) + int(name_bytes) + int(extra_bytes)


def loaded(stream: Readable, offset: int, length: int) -> Any:
    """Return what an archive holds, by torch's restricted unpickler, which runs no code."""
    content = FileSlice(stream, offset, length).read()
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def small_pickle(stream: Readable, offset: int, length: int) -> bytes:
    """Return the pickle in an archive that holds little else; ValueError for a large one."""
    with zipfile.ZipFile(FileSlice(stream, offset, length)) as archive:
        [record] = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
        if record.file_size > _SMALL_PICKLE_BYTES:
            raise ValueError(f"it has {record.file_size} bytes")
        return archive.read(record)


def archive_problem(stream: FileSlice) -> str | None:
    """Compare the checksums in an archive with its content; None when they match."""
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except Exception as error:
        return describe_error(error)
    return None if damaged is None else f"checksum of {damaged}"
