"""Pieces of files: archives of ``torch.save``, slices that are read out of them, and checksums.

A piece has a tensor or an object of a checkpoint, see ``manifest.Piece``.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple, cast

import torch
import xxhash

from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.tensor_memory import memory_of

DIGITS = 16  # of a checksum
RunningChecksum = xxhash.xxh3_64
"""The :func:`checksum_of` bytes that are added one after the other, by its ``hexdigest()``."""
_SCRATCH_BYTES = 1 << 20  # small enough to stay in the cache until its checksum is computed
_SMALL_BYTES = 1 << 20  # below, most of the time is spent in torch.save, not in the write
_SMALL_PICKLE_BYTES = 1 << 12
_STEP_BYTES = 1 << 19  # read and checked at a time: small enough to stay in the cache of a core
_OTHER_LAYOUT = "this version of torch.save has another layout of archives"
# Of the zip format: the lengths of name and extra field in a file's header, and the offsets of
# CRC-32 and name in an entry of the central directory.
_LOCAL_HEADER = struct.Struct("<26xHH")
_CRC_IN_DIRECTORY, _NAME_IN_DIRECTORY = 16, 46

Readable = BinaryIO | io.RawIOBase
Unbuffered = io.RawIOBase | io.BytesIO


class Seekable(io.RawIOBase):
    """A read-only file of known length with a position. Subclasses add the reads."""

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
    """Some bytes of an open file as a read-only file of their own. Keep the stream open."""

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


class ChecksummedStream:
    """A file that is written from its start on, with a running checksum."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._running, self.end = stream, RunningChecksum(), 0
        self.largest = (0, 0)  # length and position of the largest write

    def write(self, content: bytes | memoryview) -> int:
        """Write bytes and add them to the checksum."""
        self._running.update(content)
        self.largest = max(self.largest, (len(content), self.end))
        self.end += len(content)
        return self._stream.write(content)

    def flush(self) -> None:
        """Do nothing. torch.save expects the method."""

    def take_checksum(self) -> bytes:
        """Return the checksum of the bytes since the last call."""
        running, self._running = self._running, RunningChecksum()
        return running.digest()


def write_tensor(stream: ChecksummedStream, tensor: torch.Tensor) -> int:
    """Write a contiguous CPU tensor, alone in its storage, as ``torch.save`` does.

    Returns the number of bytes before the elements.
    """
    if tensor.nbytes <= _SMALL_BYTES:
        template = _make_template(tensor.dtype, tuple(tensor.shape))
        stream.write(template.fill(memory_of(tensor)))
        return len(template.head)
    start, stream.largest = stream.end, (0, 0)
    torch.save(tensor, cast("BinaryIO", stream))
    length, at = stream.largest
    if length != tensor.nbytes:
        raise RuntimeError(_OTHER_LAYOUT)
    return at - start


@lru_cache
def is_storable(dtype: torch.dtype) -> bool:
    """Return whether torch saves and loads tensors of a dtype."""
    stream = io.BytesIO()
    try:
        torch.save(torch.empty(1, dtype=dtype, device="cpu"), stream)
        found: torch.Tensor = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception:  # of many types, such as KeyError
        return False
    return found.dtype == dtype


class _Template(NamedTuple):
    """An archive of a tensor without its elements, and the places of their CRC-32 in its tail."""

    head: bytes
    tail: bytes
    crc_places: tuple[int, ...]

    def fill(self, elements: memoryview) -> bytes:
        """Return the archive of these elements."""
        tail, crc = bytearray(self.tail), struct.pack("<I", zlib.crc32(elements))
        for place in self.crc_places:
            tail[place : place + 4] = crc
        return b"".join((self.head, elements, tail))


@lru_cache(maxsize=64)
def _make_template(dtype: torch.dtype, shape: tuple[int, ...]) -> _Template:
    # torch.save needs a quarter of a millisecond for an archive. Of tensors of one dtype and shape
    # only the elements and their CRC-32 differ, so it runs once and the two are filled in.
    sample, stream = torch.empty(shape, dtype=dtype, device="cpu"), io.BytesIO()
    if not sample.nbytes:
        torch.save(sample, stream)
        return _Template(stream.getvalue(), b"", ())
    memory_of(sample)[:] = bytes(sample.nbytes)
    torch.save(sample, stream)
    content = stream.getvalue()
    at = elements_at(stream, 0, len(content), sample.nbytes)
    if at is None:
        raise RuntimeError(_OTHER_LAYOUT)
    tail, crc = content[at + sample.nbytes :], struct.pack("<I", zlib.crc32(memory_of(sample)))
    with zipfile.ZipFile(stream) as archive:
        [record] = _list_data_records(archive)
    name = record.filename.encode()
    # After the elements, and in the central directory of the zip format.
    places = (4, tail.index(name) - _NAME_IN_DIRECTORY + _CRC_IN_DIRECTORY)
    if any(tail[place : place + 4] != crc for place in places):
        raise RuntimeError(_OTHER_LAYOUT)
    return _Template(content[:at], tail, places)


def _list_data_records(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [
        info for info in archive.infolist() if PurePosixPath(info.filename).parent.name == "data"
    ]


def elements_at(stream: Readable, offset: int, length: int, num_bytes: int) -> int | None:
    """Return the position in a file of the elements of the only tensor in an archive.

    None if the archive has another layout, or the tensor does not have ``num_bytes``.
    """
    with zipfile.ZipFile(FileSlice(stream, offset, length)) as archive:
        records = _list_data_records(archive)
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        return None
    if records[0].file_size != num_bytes:
        return None
    header = offset + records[0].header_offset
    stream.seek(header)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return header + int(_LOCAL_HEADER.size) + int(name_bytes) + int(extra_bytes)


def read_small_pickle(stream: Readable, offset: int, length: int) -> bytes:
    """Return the pickle in an archive. A large one is a ValueError."""
    with zipfile.ZipFile(FileSlice(stream, offset, length)) as archive:
        [record] = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
        if record.file_size > _SMALL_PICKLE_BYTES:
            raise ValueError(f"it has {record.file_size} bytes")
        return archive.read(record)


def read_next(stream: Unbuffered, memory: memoryview) -> None:
    """Fill memory with the next bytes of a file. A short file is an EOFError."""
    left = memory
    while left:
        count = stream.readinto(left)
        if not count:
            end = stream.tell()
            raise EOFError(f"it ends at byte {end}, not {end + len(left)}")
        left = left[count:]


class Scratch:
    """Memory that pieces of files are read into before they are copied to a target."""

    def __init__(self, num_bytes: int = _SCRATCH_BYTES) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.memory = memory_of(self.tensor)


def checksum_of(content: bytes | bytearray | memoryview) -> str:
    """Return the checksum of some bytes, XXH3 of 64 bits, as 16 hexadecimal digits.

    An accidental change keeps the checksum once in 2**64 cases. It is no protection against an
    attacker, who can choose content with a given checksum.
    """
    return xxhash.xxh3_64_hexdigest(content)


def checksum_in(stream: Unbuffered, offset: int, length: int, scratch: Scratch) -> str:
    """Return the checksum of some bytes of an unbuffered file."""
    checked = CheckedStream(stream, offset, scratch)
    checked.skip(length)
    return checked.running.hexdigest()


class Part(NamedTuple):
    """The start of a box in a stored shard, and the tensor that it is copied to."""

    start: Shape
    target: torch.Tensor


class SkippingStream:
    """A file that is read in order, except for the bytes that are skipped."""

    def __init__(self, stream: Unbuffered, at: int, scratch: Scratch) -> None:
        self.scratch, self._stream = scratch, stream
        stream.seek(at)

    def read(self, memory: memoryview) -> None:
        """Fill memory. A short file is an EOFError."""
        read_next(self._stream, memory)

    def skip(self, length: int) -> None:
        """Continue after some bytes."""
        if length:
            self._stream.seek(length, os.SEEK_CUR)


class CheckedStream(SkippingStream):
    """A file that is read in order, also what is skipped, with a running checksum."""

    def __init__(self, stream: Unbuffered, at: int, scratch: Scratch) -> None:
        super().__init__(stream, at, scratch)
        self.running = RunningChecksum()

    def read(self, memory: memoryview) -> None:
        """Fill memory in steps. Each is added to the checksum while it is in the cache."""
        for start in range(0, len(memory), _STEP_BYTES):
            step = memory[start : start + _STEP_BYTES]
            read_next(self._stream, step)
            self.running.update(step)

    def skip(self, length: int) -> None:
        """Add bytes to the checksum without keeping them."""
        size = len(self.scratch.memory)
        for start in range(0, length, size):
            self.read(self.scratch.memory[: min(size, length - start)])


def read_shard(
    stream: SkippingStream, shape: Shape, parts: Sequence[Part], dtype: torch.dtype
) -> None:
    """Read the shard at the stream's position, row-major, and fill the targets of all parts.

    A target may have any device, any strides, and any floating-point dtype or the stored ``dtype``.
    """
    if not shape:
        shape = (1,)
        parts = [Part((0,), part.target.unsqueeze(0)) for part in parts]
    row_bytes = prod(shape[1:]) * dtype.itemsize
    begin = min((part.start[0] for part in parts), default=shape[0])
    end = max((part.start[0] + part.target.shape[0] for part in parts), default=shape[0])
    stream.skip(begin * row_bytes)
    if len(parts) == 1 and _has_file_layout(shape, parts[0].target, dtype):
        stream.read(memory_of(parts[0].target))
        torch.autograd.graph.increment_version(parts[0].target)  # autograd has not seen the read
    elif len(shape) > 1 and row_bytes > len(stream.scratch.memory):
        for row in range(begin, end):
            inside = [
                Part(part.start[1:], part.target[row - part.start[0]])
                for part in parts
                if part.start[0] <= row < part.start[0] + part.target.shape[0]
            ]
            read_shard(stream, shape[1:], inside, dtype)
    else:
        step = max(1, len(stream.scratch.memory) // max(1, row_bytes))
        for first in range(begin, end, step):
            count = min(step, end - first)
            memory = stream.scratch.memory[: count * row_bytes]
            stream.read(memory)
            rows = stream.scratch.tensor[: len(memory)].view(dtype).view(count, *shape[1:])
            for part in parts:
                _copy_rows(rows, first, part)
    stream.skip((shape[0] - end) * row_bytes)


def _copy_rows(rows: torch.Tensor, first: int, part: Part) -> None:
    """Copy the overlap of a part with the rows from ``first`` on."""
    begin = max(first, part.start[0])
    end = min(first + rows.shape[0], part.start[0] + part.target.shape[0])
    if begin >= end:
        return
    source = rows[begin - first : end - first]
    for dim in range(1, rows.ndim):
        source = source.narrow(dim, part.start[dim], part.target.shape[dim])
    part.target[begin - part.start[0] : end - part.start[0]].copy_(source)


def _has_file_layout(shape: Sequence[int], target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a target has the bytes of the file in the order of the file."""
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and tuple(target.shape[1:]) == tuple(shape[1:])
    )
