"""A checkpoint for inspection: its index, and its values box by box."""

from __future__ import annotations

import io
import reprlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from math import prod
from typing import Any, cast

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.index import plain_value, read_index
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, Piece, StoredKey
from mcore.parallel.checkpoint.files.pieces import (
    FileSlice,
    Scratch,
    elements_at,
    read_slice,
    read_small_pickle,
)
from mcore.parallel.checkpoint.files.places import PathLike, Place, open_regular, place_of
from mcore.parallel.checkpoint.objects import object_kind
from mcore.parallel.checkpoint.planning.validation import have_shared_elements
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.shortened import titled_list
from mcore.parallel.torch_compat import METADATA_FILE

_PREVIEW = 60


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
            content = read_small_pickle(self._open(piece), piece.at, piece.length)
            text = short_repr(plain_value(content))
        except Exception:  # damaged or hostile content can raise anything
            return ""
        return text if len(text) <= _PREVIEW else f"{text[: _PREVIEW - 3]}..."

    def raw(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object's archive."""
        for piece in self.index.keys[name].pieces:
            content = FileSlice(self._open(piece), piece.at, piece.length)
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
                read_slice(stream, at, piece.shape, inside, target, dtype, self._make_scratch())
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
            return elements_at(self._open(piece), piece.at, piece.length, num_bytes)
        except Exception:  # a damaged archive can raise anything
            return None

    def _decode_piece(self, name: str, piece: Piece) -> Any:
        if piece.transforms:
            raise CheckpointingException(
                f"{self.directory}: key {name!r} was stored through {', '.join(piece.transforms)}. "
                "Load it by torch.distributed.checkpoint"
            )
        try:
            content = FileSlice(self._open(piece), piece.at, piece.length).read()
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

    def _make_scratch(self) -> Scratch:
        if "scratch" not in self._local.__dict__:
            self._local.scratch = Scratch()
        return cast("Scratch", self._local.scratch)


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
