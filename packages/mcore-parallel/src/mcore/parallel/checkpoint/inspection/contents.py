"""A checkpoint for inspection: its index, its values box by box, and the output of commands."""

from __future__ import annotations

import io
import json
import math
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TextIO, cast

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.figures import show_progress
from mcore.parallel.checkpoint.files import pieces
from mcore.parallel.checkpoint.files.index import plain_value, read_index
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, Piece, StoredKey
from mcore.parallel.checkpoint.files.places import PathLike, Place, open_regular, place_of
from mcore.parallel.checkpoint.objects import object_kind
from mcore.parallel.checkpoint.planning.validation import have_shared_elements
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.shortened import counted, titled_list
from mcore.parallel.torch_compat import METADATA_FILE

_PREVIEW = 60
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def is_checkpoint(directory: Place) -> bool:
    """Return whether a directory has a file that only checkpoints have."""
    return (directory / MANIFEST_FILE).exists() or (directory / METADATA_FILE).exists()


def checkpoints_in(root: Place) -> list[Place]:
    """List the checkpoints, complete or not, in a run's folder or its folder ``checkpoints``."""
    if not root.is_dir() or is_checkpoint(root):
        return []
    inside: Iterable[Place] = root.iterdir()
    found = sorted(filter(is_checkpoint, inside), key=_split_number)
    if not found and root.name != "checkpoints":
        return checkpoints_in(root / "checkpoints")
    return found


def _split_number(path: Place) -> tuple[bool, str, int]:
    name = path.name.rstrip("0123456789")
    digits = path.name[len(name) :]
    return (not digits, name, int(digits or 0))


def short_repr(value: Any) -> str:
    """Return the start of a value as text, which also ends for a value that contains itself."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, _PREVIEW, _PREVIEW
    return short.repr(value)


class Contents:
    """One checkpoint, for several threads. Damage raises CheckpointingException."""

    def __init__(self, path: PathLike) -> None:
        self.directory = place_of(path)
        found = checkpoints_in(self.directory)
        if found:
            raise CheckpointingException(
                f"{self.directory} is a folder with {len(found)} checkpoints. Give one of them, "
                f"such as {found[-1]}"
            )
        self.index = read_index(self.directory)
        self._opened = ExitStack()
        self._local = threading.local()

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def names(self, patterns: Sequence[str] = ()) -> list[str]:
        """List the keys, sorted. With patterns, only keys that match or are equal to one."""
        found = self.matching(patterns)
        if patterns and not found:
            raise CheckpointingException(
                f"{self.directory} has no key {' or '.join(map(repr, patterns))}. ls lists its keys"
            )
        return found

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """List the keys as :meth:`names` does, or none."""
        return sorted(
            name
            for name in self.index.keys
            if not patterns or any(one == name or fnmatchcase(name, one) for one in patterns)
        )

    def value(self, name: str) -> Any:
        """Read an object. No code runs."""
        [piece] = self.index.keys[name].pieces
        return self._decode_piece(name, piece)

    def preview(self, name: str) -> str:
        """Return a small, plain object as text, without torch's unpickler, else an empty text."""
        try:
            [piece] = self.index.keys[name].pieces
            if not object_kind(name).is_archive:
                return short_repr(self.value(name))
            content = pieces.read_small_pickle(self._open(piece), piece.at, piece.length)
            text = short_repr(plain_value(content))
        except Exception:  # damaged or hostile content can raise anything
            return ""
        return text if len(text) <= _PREVIEW else f"{text[: _PREVIEW - 3]}..."

    def raw(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object's archive."""
        for piece in self.index.keys[name].pieces:
            content = pieces.FileSlice(self._open(piece), piece.at, piece.length)
            while chunk := content.read(1 << 20):
                yield chunk

    def box(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """Read a box of a whole tensor to the CPU, from all pieces that overlap it."""
        stored = self.index.keys[name]
        target = torch.empty(shape, dtype=stored.dtype, device="cpu")
        for piece in stored.pieces:
            self._copy_overlap(name, stored, piece, start, target)
        return target

    def require_whole(self, names: Iterable[str]) -> None:
        """Raise for tensors whose pieces do not make them up, before memory for them is needed."""
        keys = self.index.keys
        problems = [
            f"key {name!r} {problem}" for name in names if (problem := coverage_problem(keys[name]))
        ]
        if problems:
            title = f"{self.directory} has tensors that cannot be read"
            raise CheckpointingException(titled_list(title, problems))

    def _copy_overlap(
        self, name: str, stored: StoredKey, piece: Piece, start: Shape, target: torch.Tensor
    ) -> None:
        """Fill the part of a box that is in a piece."""
        inside = []
        for dim, (begin, held) in enumerate(zip(piece.start, piece.shape, strict=True)):
            first = max(begin, start[dim])
            length = min(begin + held, start[dim] + target.shape[dim]) - first
            if length <= 0:
                return
            target = target.narrow(dim, first - start[dim], length)
            inside.append(first - begin)
        dtype = cast("torch.dtype", stored.dtype)
        stream, at = self._open(piece), self._find_elements(piece, dtype)
        try:
            if at is None:
                whole = self._decode_piece(name, piece)
                for dim, first in enumerate(inside):
                    whole = whole.narrow(dim, first, target.shape[dim])
                target.copy_(whole)
            else:
                source = pieces.SkippingStream(stream, at, self._make_scratch())
                pieces.read_shard(source, piece.shape, [pieces.Part(tuple(inside), target)], dtype)
        except (OSError, EOFError) as error:
            raise CheckpointingException(
                f"{self.directory / piece.file}: key {name!r} cannot be read "
                f"({describe_error(error)})"
            ) from error

    def _find_elements(self, piece: Piece, dtype: torch.dtype) -> int | None:
        """Return the position of a piece's elements in its file. None: only torch can read them."""
        if piece.elements is not None:
            return piece.at + piece.elements
        if piece.transforms:
            return None
        num_bytes = prod(piece.shape) * dtype.itemsize
        try:
            return pieces.elements_at(self._open(piece), piece.at, piece.length, num_bytes)
        except Exception:  # a damaged archive can raise anything
            return None

    def _decode_piece(self, name: str, piece: Piece) -> Any:
        if piece.transforms:
            raise CheckpointingException(
                f"{self.directory}: key {name!r} was stored through {', '.join(piece.transforms)}. "
                "Load it by torch.distributed.checkpoint"
            )
        try:
            content = pieces.FileSlice(self._open(piece), piece.at, piece.length).read()
            return object_kind(name).decode(io.BytesIO(content))
        except CheckpointingException:
            raise
        except Exception as error:
            raise CheckpointingException(
                f"{self.directory / piece.file}: key {name!r} cannot be unpickled "
                f"({describe_error(error)})"
            ) from error

    def _open(self, piece: Piece) -> Any:
        """Return this thread's stream of the file of a piece."""
        streams = self._local.__dict__.setdefault("streams", {})
        if piece.file not in streams:
            streams[piece.file] = self._opened.enter_context(
                open_regular(self.directory / piece.file)
            )
        return streams[piece.file]

    def _make_scratch(self) -> pieces.Scratch:
        if "scratch" not in self._local.__dict__:
            self._local.scratch = pieces.Scratch()
        return cast("pieces.Scratch", self._local.scratch)


def coverage_problem(stored: StoredKey) -> str | None:
    """Return why the pieces of a tensor do not make it up, which a load refuses, or None."""
    if stored.dtype is None:
        return None
    held = sum(prod(piece.shape) for piece in stored.pieces)
    if held != prod(stored.shape):
        return f"was not saved whole: its pieces have {held} of {prod(stored.shape)} elements"
    if have_shared_elements([(piece.start, piece.shape) for piece in stored.pieces]):
        return "was not saved whole: its pieces overlap, and other elements are missing"
    return None


def num_bytes_of(stored: StoredKey) -> int:
    """Return the bytes of a tensor's elements, or of an object's archive."""
    if stored.dtype is None:
        return sum(piece.length for piece in stored.pieces)
    return prod(stored.shape) * stored.dtype.itemsize


def dtype_text(name: str, stored: StoredKey) -> str:
    """Return the name of a tensor's dtype, or of an object's kind."""
    if stored.dtype is None:
        return object_kind(name).kind
    return str(stored.dtype).removeprefix("torch.")


class Output:
    """Prints results, as text or JSON, to one stream and a progress bar to another."""

    def __init__(self, stream: TextIO, bar_stream: TextIO, *, as_json: bool = False) -> None:
        self._stream, self._bar_stream, self._as_json = stream, bar_stream, as_json

    def report(self, content: Any, lines: Iterable[str]) -> None:
        """Print a result, as one JSON document or as lines of text."""
        if self._as_json:
            lines = [json.dumps(_make_plain(content), indent=1, allow_nan=False)]
        for line in lines:
            self._stream.write(f"{line}\n")

    def progress(
        self, title: str, num_bytes: int
    ) -> AbstractContextManager[Callable[[int], object]]:
        """Return a context with a function that adds bytes to a bar, shown on a terminal only."""
        return show_progress(escaped(title), num_bytes, self._bar_stream, 0)


def _make_plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return value


def escaped(text: str) -> str:
    """Escape control and invisible characters, which a terminal may act on."""
    if text.isprintable():
        return text.replace("\\", "\\\\") if "\\" in text else text
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()
        for char in text
    )


def size_text(num_bytes: int) -> str:
    """Format a size for people: ``12 bytes``, ``1.5 GiB``."""
    size, place = float(num_bytes), 0
    while size >= 1024 and place < len(_UNITS) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.1f} {_UNITS[place]}" if place else counted(num_bytes, "byte")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Format rows as lines in columns, escaped. Columns of numbers are right-aligned."""
    given = [list(row) for row in rows]
    texts = [list(titles), *([escaped(str(cell)) for cell in row] for row in given)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    is_number = [
        bool(given) and all(isinstance(row[place], int) for row in given)
        for place in range(len(titles))
    ]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in texts
    ]
