"""The manifest: the keys, files and checksums of a checkpoint, written last and read first.

A load reads the manifest on one rank, which sends it to all others.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.pieces import DIGITS, checksum_of
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.tensor_memory import memory_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from mcore.parallel.checkpoint.files.places import Place

MANIFEST_FILE = "manifest.json"
MANIFEST_START = b'{"format": "mcore sharded checkpoint", "version": '
ALIGNMENT_BYTES = 64  # as in archives of torch.save: unaligned memory is copied half as fast
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
"""Every dtype by its name in files."""
_HEADER = MANIFEST_START + b'3, "content": [\n'
_END = b'], "checksum": "'
_AFTER = b'"}\n'
_ROWS = 4096  # per line: json makes objects of a whole line, which bounds the memory
_MOST_AXES = 1000  # more would make each check of a shape slow
_MOST_BYTES = 1 << 62  # of a file
_FEW = 64  # pieces whose objects cost less than a choice among them
_LAST = chr(0x10FFFF)  # sorts after every file name


_Position = TypeVar("_Position", int, torch.Tensor)


class Piece(NamedTuple):
    """A shard of a tensor, or an object, in a file: an archive of torch.save, then zeros."""

    file: str
    at: int  # its first byte
    length: int  # of the archive
    span: int  # up to the next piece
    checksum: str  # of the span, empty if unknown
    elements: int | None  # from ``at`` to a tensor's first element, None if unknown
    start: Shape  # in the global tensor
    shape: Shape
    transforms: tuple[str, ...] = ()  # applied to the bytes by torch's writer


Box = tuple[Shape, Shape]
"""The offset and the shape of a part of a tensor."""


class StoredKey(NamedTuple):
    """A tensor or an object of a checkpoint."""

    dtype: torch.dtype | None  # None: an object
    shape: Shape
    pieces: Sequence[Piece]


def describe_for_torch(
    keys: Mapping[str, StoredKey],
) -> tuple[Metadata, dict[MetadataIndex, Piece]]:
    """Describe keys as torch.distributed.checkpoint does, and return their pieces by its index."""
    # Imported here: it takes seconds that only a save or load needs.
    from torch.distributed.checkpoint import metadata as dcp

    described: dict[str, Any] = {}
    pieces: dict[MetadataIndex, Piece] = {}
    # Shared by the keys, which keeps the pickled index small.
    size_of = cache(torch.Size)
    properties_of = cache(lambda dtype: dcp.TensorProperties(dtype=dtype))
    for name, (dtype, shape, inside) in keys.items():
        for piece in inside:
            start = None if dtype is None else piece.start
            pieces[dcp.MetadataIndex(name, start)] = piece
        boxes = [(size_of(piece.start), size_of(piece.shape)) for piece in inside]
        described[name] = (
            dcp.BytesStorageMetadata()
            if dtype is None
            else dcp.TensorStorageMetadata(
                properties_of(dtype),
                size_of(shape),
                [dcp.ChunkStorageMetadata(*box) for box in boxes],
            )
        )
    return dcp.Metadata(described), pieces


class Index(NamedTuple):
    """The keys of a checkpoint, its files and their checksums."""

    keys: Mapping[str, StoredKey]
    files: Mapping[str, int]  # sizes in bytes, without a manifest the least sizes
    has_checksums: bool  # False without a manifest: torch's index has none
    whole_files: Mapping[str, str] = {}  # checksums of files without pieces


Pieces = Sequence[tuple[str, Piece]]
"""The pieces of a file in order, after their keys."""


def encode_manifest(
    keys: Mapping[str, StoredKey],
    files: Mapping[str, Pieces],
    whole_files: Mapping[str, tuple[int, str]],
) -> bytes:
    """Return the manifest of files with pieces, and of others with their size and checksum."""
    lines = [json.dumps(line).encode() for line in _list_lines(keys, files, whole_files)]
    content = _HEADER + b",\n".join(lines) + b"\n"
    return content + _END + checksum_of(content).encode() + _AFTER


def _list_lines(
    keys: Mapping[str, StoredKey],
    files: Mapping[str, Pieces],
    whole_files: Mapping[str, tuple[int, str]],
) -> Iterator[dict[str, Any]]:
    sizes = {name: (pieces[-1][1].at + pieces[-1][1].length, "") for name, pieces in files.items()}
    yield {"files": dict(sorted({**sizes, **whole_files}.items()))}
    names = sorted(keys)
    for rows in _split_rows(names):
        yield {
            "keys": rows,
            "dtypes": [str(keys[name].dtype or "").removeprefix("torch.") for name in rows],
            "axes": [len(keys[name].shape) for name in rows],
            "shapes": [size for name in rows for size in keys[name].shape],
        }
    numbers = {name: number for number, name in enumerate(names)}
    for file, every in sorted(files.items()):
        for named in _split_rows(every):
            pieces = [piece for _, piece in named]
            yield {
                "file": file,
                "at": pieces[0].at,
                "keys": [numbers[key] for key, _ in named],
                "lengths": [piece.length for piece in pieces],
                "elements": [-1 if one.elements is None else one.elements for one in pieces],
                "checksums": "".join(piece.checksum for piece in pieces),
                "boxes": [n for piece in pieces for n in (*piece.start, *piece.shape)],
            }


def _split_rows(rows: Sequence[Any]) -> Iterator[list[Any]]:
    left = iter(rows)
    while batch := list(islice(left, _ROWS)):
        yield batch


def decode_manifest(path: Place, raw: bytes) -> Index:
    """Return the content of a manifest, checked."""
    version = re.split(rb"[,}]", raw[len(MANIFEST_START) : len(MANIFEST_START) + 20])[0]
    if version != b"3":
        raise CheckpointingException(
            f"{path} has version {version.decode(errors='backslashreplace')}, but this version of "
            "mcore-parallel reads version 3 only. Either another version wrote it, or the file has "
            "changed. Take another checkpoint"
        )
    end = len(raw) - len(_END) - DIGITS - len(_AFTER)
    closing = _END + checksum_of(memoryview(raw)[: max(end, 0)]).encode() + _AFTER
    if not raw.startswith(_HEADER) or not raw.endswith(closing):
        raise CheckpointingException(
            f"{path} has changed since it was saved. Take another checkpoint"
        )
    try:
        return _parse_lines(raw, end)
    except Exception as error:  # any error of the parser: a hostile file may contain anything
        raise CheckpointingException(
            f"{path} contradicts itself ({type(error).__name__}: {error}). Take another checkpoint"
        ) from error


def _parse_lines(raw: bytes, end: int) -> Index:
    lines = _load_lines(raw, len(_HEADER), end)
    files: dict[str, tuple[int, str]] = {
        name: (size, checksum) for name, (size, checksum) in next(lines)["files"].items()
    }
    if not all(is_plain_name(name) and type(size) is int for name, (size, _) in files.items()):
        raise ValueError("a file has no plain name or no size")
    keys = KeyTable({name: size for name, (size, checksum) in files.items() if not checksum})
    for line in lines:  # the values of a line are in the order of the parameters
        (keys.add_pieces if "file" in line else keys.add_keys)(*line.values())
    keys.finish()
    return Index(
        keys,
        {name: size for name, (size, _) in files.items()},
        True,
        {name: checksum for name, (_, checksum) in files.items() if checksum},
    )


def _load_lines(raw: bytes, position: int, end: int) -> Iterator[Any]:
    # Line by line: the objects of all lines at once would need ten times the memory.
    while position < end:
        next_line = raw.index(b"\n", position) + 1
        yield json.loads(raw[position:next_line].rstrip(b",\n"))
        position = next_line


class KeyTable(Mapping[str, StoredKey]):
    """Keys and pieces as columns of numbers; looking a key up builds it.

    As objects, half a million pieces need a gigabyte. Pieces are added file by file, in the order
    in which they are stored. Columns are as narrow as their numbers allow.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        self._sizes = files
        self._blocks: list[tuple[int, str]] = []  # number of the first piece, and the file
        self._ends: dict[str, int] = {}
        self._names: list[str] = []
        self._kinds: list[torch.dtype | None] = []
        self._places: dict[str, int] = {}
        self._dtypes = array("i")  # positions in ``_kinds``
        self._axes, self._shapes = array("i"), array("i")
        self._key_of, self._at = array("i"), array("q")
        self._lengths, self._elements = array("i"), array("i")
        self._boxes = array("i")
        self._checksums = bytearray()

    def add_keys(
        self, names: list[str], dtypes: list[str], axes: list[int], shapes: list[int]
    ) -> None:
        """Append keys in the order of their names. An object has an empty dtype."""
        inside = [*self._names[-1:], *names]
        if not set(map(type, names)) <= {str} or sorted(set(inside)) != inside:
            raise ValueError("keys are not sorted")
        self._names += names
        for name in sorted({*dtypes} - {*self._places}):
            self._places[name] = len(self._kinds)
            self._kinds.append(DTYPES[name] if name else None)
        self._dtypes.extend([self._places[name] for name in dtypes])
        self._axes = _extend(self._axes, axes)
        self._shapes = _extend(self._shapes, shapes)

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
        """Append pieces of a file from a position on. An object has -1 elements."""
        # Positions are implied: a piece starts at the first aligned byte after the previous piece.
        if at != aligned(self._ends.get(file, 0)):
            raise ValueError(f"the pieces of {file} leave a gap")
        if len(checksums) != DIGITS * len(lengths) or not lengths:
            raise ValueError("there are not as many checksums as pieces")
        self._blocks.append((len(self._at), file))
        spans = aligned(torch.frombuffer(array("q", lengths), dtype=torch.int64))
        if at + spans.double().sum() > _MOST_BYTES:  # the sums of 64-bit integers would be wrong
            raise ValueError(f"{file} has pieces that are too long")
        self._at.frombytes(memory_of(spans.cumsum(0) - spans + at))
        self._ends[file] = self._at[-1] + lengths[-1]
        self._key_of = _extend(self._key_of, keys)
        self._lengths = _extend(self._lengths, lengths)
        self._elements = _extend(self._elements, elements)
        self._boxes = _extend(self._boxes, boxes)
        self._checksums += bytes.fromhex(checksums)

    def finish(self) -> None:
        """Check that the columns fit each other (else ValueError) and sort the pieces by key."""
        counts = {len(self._names), len(self._dtypes), len(self._axes)}
        columns = {len(c) for c in (self._key_of, self._at, self._lengths, self._elements)}
        if len(counts) != 1 or len(columns) != 1:
            raise ValueError("the columns have different lengths")
        # Checked once here, so that lookups can index without further checks.
        axes, keys = _view(self._axes), _view(self._key_of)
        columns_of_sizes = (axes, keys, _view(self._shapes), _view(self._lengths))
        if any((column < 0).any() for column in columns_of_sizes) or (keys >= len(self)).any():
            raise ValueError("a number is outside its range")
        if (axes > _MOST_AXES).any():
            raise ValueError(f"a shape has over {_MOST_AXES} axes")
        if axes.sum() != len(self._shapes):
            raise ValueError("the shapes do not have as many numbers as axes")
        self._shape_at = _sum_up(axes)
        self._box_at = _sum_up(2 * axes[keys])
        if self._box_at[-1] != len(self._boxes):
            raise ValueError("the boxes do not have as many numbers as axes")
        self._first = _sum_up(torch.bincount(keys, minlength=len(self)))
        self._order = memory_of(torch.argsort(keys, stable=True).int()).cast("i")
        if self._ends != self._sizes:
            raise ValueError("the pieces of a file do not end at its size")

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find_number(name) is not None

    def __getitem__(self, name: str) -> StoredKey:
        return self.build_key(name)

    def build_key(self, name: str, boxes: Sequence[Box] | None = None) -> StoredKey:
        """Return a key. With ``boxes`` it may lack the pieces that share no element with them."""
        key = self._find_number(name)
        if key is None:
            raise KeyError(name)
        begin = self._shape_at[key]
        shape = tuple(self._shapes[begin : begin + self._axes[key]])
        dtype = self._kinds[self._dtypes[key]]
        numbers: Sequence[int] = self._order[self._first[key] : self._first[key + 1]]
        if boxes is not None and len(numbers) > _FEW:
            numbers = self._choose_inside(numbers, shape, boxes)
        pieces = tuple(self._build_piece(number, len(shape)) for number in numbers)
        stored = StoredKey(dtype, shape, pieces)
        if not _is_consistent(stored):
            raise CheckpointingException(
                f"key {name!r}: its pieces do not fit its shape {shape} and dtype {dtype}, though "
                "the checksum of the manifest is right. The program that wrote the manifest may "
                "have a bug. Take another checkpoint"
            )
        return stored

    def _find_number(self, name: str) -> int | None:
        place = bisect_left(self._names, name)
        return place if self._names[place : place + 1] == [name] else None

    def _choose_inside(
        self, numbers: Sequence[int], whole: Shape, boxes: Sequence[Box]
    ) -> Sequence[int]:
        """Return the numbers of the pieces in boxes, or all if one does not fit its tensor."""
        axes, wide = len(whole), torch.int64
        if not axes or {len(start) for start, _ in boxes} != {axes}:
            return numbers
        order = torch.frombuffer(numbers, dtype=torch.int32)
        column = _view(self._boxes)
        first = torch.frombuffer(self._box_at, dtype=wide)[order.to(wide)]
        rows = column[first[:, None] + torch.arange(2 * axes, device="cpu")].to(wide)
        starts, ends = rows[:, :axes], rows[:, :axes] + rows[:, axes:]
        if (rows < 0).any() or (ends > torch.tensor(whole, dtype=wide, device="cpu")).any():
            return numbers
        is_chosen = torch.zeros(len(order), dtype=torch.bool, device="cpu")
        for start, shape in boxes:
            begin, size = torch.tensor((start, shape), dtype=wide, device="cpu")
            is_chosen |= ((starts < begin + size) & (ends > begin)).all(1)
        return array("i", order[is_chosen].tolist())

    def _build_piece(self, number: int, axes: int) -> Piece:
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


def key_with_boxes(
    keys: Mapping[str, StoredKey], name: str, boxes: Sequence[Box] | None
) -> StoredKey:
    """Return a key of an index. Pieces outside of the boxes may be missing."""
    return keys.build_key(name, boxes) if isinstance(keys, KeyTable) else keys[name]


def _view(column: array[int]) -> torch.Tensor:
    """Return a column as a tensor of the same memory."""
    dtype = torch.int32 if column.typecode == "i" else torch.int64
    if not column:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(column, dtype=dtype)


def _sum_up(counts: torch.Tensor) -> memoryview[int]:
    """Return the start of each run and the end of the last: plain integers, quick to look up."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=starts[1:])
    return memory_of(starts).cast("q")


def _extend(column: array[int], values: list[int]) -> array[int]:
    """Return a column with more numbers, wider if they need it."""
    try:
        column.extend(array(column.typecode, values))
    except OverflowError:
        column = array("q", column)
        column.extend(array("q", values))
    return column


def _is_consistent(stored: StoredKey) -> bool:
    if stored.dtype is None:
        return len(stored.pieces) == 1 and stored.pieces[0].elements is None
    itemsize = stored.dtype.itemsize
    return all(
        piece.elements is not None
        and piece.elements + prod(piece.shape) * itemsize <= piece.length
        and is_inside(piece.start, piece.shape, stored.shape)
        for piece in stored.pieces
    )


def aligned(position: _Position) -> _Position:
    """Return the first place for a piece at or after a position, or those for a tensor of them."""
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of a file directly in the directory, and safe to print."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:") and name.isprintable()


def is_inside(start: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a box has as many axes as a tensor and is inside it."""
    return len(start) == len(shape) == len(whole) and all(
        first >= 0 and size >= 0 and first + size <= total
        for first, size, total in zip(start, shape, whole, strict=True)
    )
