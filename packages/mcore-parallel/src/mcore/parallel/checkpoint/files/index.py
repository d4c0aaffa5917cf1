"""What a checkpoint holds: its keys, and where in which file each piece of them lies."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.checksums import DIGITS
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.tensor_memory import memory_of

ALIGNMENT_BYTES = 64  # as in archives of torch.save: memory is copied half as fast from odd places
_LAST = chr(0x10FFFF)  # sorts after every name of a file
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
"""Every dtype by the only name that files may give it."""


class Piece(NamedTuple):
    """A shard of a tensor, or an object, in a file: an archive of torch.save, then zeros."""

    file: str
    at: int  # its first byte
    length: int  # of the archive
    span: int  # up to the next piece
    checksum: str  # of the span; empty where there is none
    elements: int | None  # from ``at`` to the first element of a tensor, row-major; None: unknown
    start: Shape  # in the global tensor
    shape: Shape
    transforms: tuple[str, ...] = ()  # what torch's own writer was told to do with the bytes


class StoredKey(NamedTuple):
    """A tensor or an object of a checkpoint."""

    dtype: torch.dtype | None  # None: an object
    shape: Shape
    pieces: tuple[Piece, ...]


class Index(NamedTuple):
    """A checkpoint's keys, its files by size (of torch's own at least that), and its checksums."""

    keys: Mapping[str, StoredKey]
    files: Mapping[str, int]
    checksums: str  # "xxh3"; "sums" before version 3; "" for torch's own, which has none
    whole_files: Mapping[str, str] = {}  # checksums of files without pieces


def aligned(position: int) -> int:
    """Return the first place for a piece at or after a position."""
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class PackedKeys(Mapping[str, StoredKey]):
    """Keys and pieces in columns of numbers, from which a key is built when it is asked for.

    Half a million pieces would take a gigabyte as objects. Pieces are added file by file, in the
    order in which they lie there. Columns are as narrow as their numbers allow.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        self._sizes = files
        self._blocks: list[tuple[int, str]] = []  # number of the first piece, and the file
        self._ends: dict[str, int] = {}
        self._names: list[str] = []
        self._kinds: list[torch.dtype | None] = []
        self._places: dict[str, int] = {}
        self._dtypes = array("i")  # places in the list of kinds
        self._axes, self._shapes = array("i"), array("i")
        self._key_of, self._at = array("i"), array("q")
        self._lengths, self._elements = array("i"), array("i")
        self._boxes = array("i")
        self._checksums = bytearray()

    def add_keys(
        self, names: list[str], dtypes: list[str], axes: list[int], shapes: list[int]
    ) -> None:
        """Append keys in the order of their names; an object has an empty dtype."""
        inside = [*self._names[-1:], *names]
        if not set(map(type, names)) <= {str} or sorted(set(inside)) != inside:
            raise ValueError("keys are not sorted")
        self._names += names
        for name in sorted({*dtypes} - {*self._places}):
            self._places[name] = len(self._kinds)
            self._kinds.append(DTYPES[name] if name else None)
        self._dtypes.extend([self._places[name] for name in dtypes])
        self._axes = _extended(self._axes, axes)
        self._shapes = _extended(self._shapes, shapes)

    def add_pieces(
        self,
        file: str,
        at: int,
        keys: list[int],
        lengths: list[int],
        elements: list[int],
        checksums: str,
        boxes: list[int],
    ) -> None:
        """Append pieces of a file from a position on; -1 elements for an object."""
        if at != aligned(self._ends.get(file, 0)):
            raise ValueError(f"the pieces of {file} leave a gap")
        if len(checksums) != DIGITS * len(lengths) or not lengths:
            raise ValueError("there are not as many checksums as pieces")
        self._blocks.append((len(self._at), file))
        steps = [-(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for length in lengths]
        self._at.extend(accumulate(steps[:-1], initial=at))
        self._ends[file] = self._at[-1] + lengths[-1]
        self._key_of = _extended(self._key_of, keys)
        self._lengths = _extended(self._lengths, lengths)
        self._elements = _extended(self._elements, elements)
        self._boxes = _extended(self._boxes, boxes)
        self._checksums += bytes.fromhex(checksums)

    def finish(self) -> None:
        """Check that the columns fit each other and sort the pieces by key; ValueError if not."""
        counts = {len(self._names), len(self._dtypes), len(self._axes)}
        columns = {len(c) for c in (self._key_of, self._at, self._lengths, self._elements)}
        if len(counts) != 1 or len(columns) != 1:
            raise ValueError("the columns have different lengths")
        axes, keys = _numbers(self._axes), _numbers(self._key_of)
        lowest = (axes, keys, _numbers(self._shapes), _numbers(self._lengths))
        if any(bool((column < 0).any()) for column in lowest) or bool((keys >= len(self)).any()):
            raise ValueError("a number lies outside its range")
        if int(axes.sum()) != len(self._shapes):
            raise ValueError("the shapes do not have as many numbers as axes")
        self._shape_at = _column(_starts(axes))
        self._box_at = _column(_starts(2 * axes.index_select(0, keys)))
        if self._box_at[-1] != len(self._boxes):
            raise ValueError("the boxes do not have as many numbers as axes")
        self._order = _column(torch.argsort(keys, stable=True).int())
        self._first = _column(_starts(torch.bincount(keys, minlength=len(self))).int())
        if self._ends != self._sizes:
            raise ValueError("the pieces of some file do not end where it ends")

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._number(name) is not None

    def __getitem__(self, name: str) -> StoredKey:
        key = self._number(name)
        if key is None:
            raise KeyError(name)
        begin = self._shape_at[key]
        shape = tuple(self._shapes[begin : begin + self._axes[key]])
        dtype = self._kinds[self._dtypes[key]]
        numbers = self._order[self._first[key] : self._first[key + 1]]
        pieces = tuple(self._piece(number, len(shape)) for number in numbers)
        stored = StoredKey(dtype, shape, pieces)
        if not _fits(stored):
            raise CheckpointingException(
                f"key {name!r}: its pieces do not fit its shape {shape} and dtype {dtype}; the "
                "manifest was changed on purpose, take another checkpoint"
            )
        return stored

    def _number(self, name: str) -> int | None:
        place = bisect_left(self._names, name)
        return place if self._names[place : place + 1] == [name] else None

    def _piece(self, number: int, axes: int) -> Piece:
        _, file = self._blocks[bisect_right(self._blocks, (number, _LAST)) - 1]
        at, length, elements = self._at[number], self._lengths[number], self._elements[number]
        box = self._box_at[number]
        digest = self._checksums[number * DIGITS // 2 : (number + 1) * DIGITS // 2]
        return Piece(
            file,
            at,
            length,
            min(aligned(at + length), self._sizes[file]) - at,
            digest.hex(),
            None if elements < 0 else elements,
            tuple(self._boxes[box : box + axes]),
            tuple(self._boxes[box + axes : box + 2 * axes]),
        )


def _extended(column: array[int], values: list[int]) -> array[int]:
    """Return a column with more numbers, in a wider one where they need it."""
    try:
        column.extend(array(column.typecode, values))
    except OverflowError:
        column = array("q", column)
        column.extend(array("q", values))
    return column


def _numbers(column: array[int]) -> torch.Tensor:
    dtype = torch.int64 if column.typecode == "q" else torch.int32
    return (
        torch.frombuffer(column, dtype=dtype)
        if column
        else torch.zeros(0, dtype=dtype, device="cpu")
    )


def _column(numbers: torch.Tensor) -> memoryview[int]:
    """Return numbers as a sequence of ints, each read in a hundredth of the time of a tensor's."""
    return memory_of(numbers).cast("q" if numbers.dtype == torch.int64 else "i")


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return where each of several runs starts, and where the last one ends."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, dtype=torch.int64, out=starts[1:])
    return starts


def _fits(stored: StoredKey) -> bool:
    if stored.dtype is None:
        return len(stored.pieces) == 1 and stored.pieces[0].elements is None
    return all(_piece_fits(piece, stored) for piece in stored.pieces)


def _piece_fits(piece: Piece, stored: StoredKey) -> bool:
    if piece.elements is None or stored.dtype is None:
        return False
    num_bytes = prod(piece.shape) * stored.dtype.itemsize
    return piece.elements + num_bytes <= piece.length and is_inside(
        piece.start, piece.shape, stored.shape
    )


def is_inside(start: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a box has the axes of a tensor and lies in it."""
    return len(start) == len(shape) == len(whole) and all(
        first >= 0 and size >= 0 and first + size <= total
        for first, size, total in zip(start, shape, whole, strict=True)
    )
