"""Reads of pieces of a checkpoint, each checked before or while it is copied to targets."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    IntactContentError,
    describe_error,
)
from mcore.parallel.checkpoint.files import pieces, places
from mcore.parallel.checkpoint.files.index import format_keys, piece_problem
from mcore.parallel.checkpoint.files.manifest import Index, Piece, StoredKey, describe_for_torch
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.torch_compat import file_part_type

Verify = Literal["while_reading", "before", False]

_DEVICE_SCRATCH_BYTES = 1 << 25  # few large copies to an accelerator are fastest


def _is_narrower(target: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a cast can make a finite value infinite. Eight-bit dtypes saturate."""
    is_float = target.is_floating_point and stored.is_floating_point and target.itemsize > 1
    return is_float and torch.finfo(target).max < torch.finfo(stored).max


class _Wanted(NamedTuple):
    """A piece of a plan and the items that need it."""

    piece: Piece
    dtype: torch.dtype | None
    items: list[ReadItem]

    @property
    def key(self) -> str:
        """Return the key of the piece."""
        return self.items[0].storage_index.fqn


class CheckedReader:
    """Reads the pieces that a rank needs of a checkpoint. A changed piece is an error."""

    def __init__(
        self, directory: places.Place, index: Index, keys: dict[str, StoredKey], verify: Verify
    ) -> None:
        self._directory, self._index, self._verify = directory, index, verify
        self._keys = keys
        self.metadata, self._pieces = describe_for_torch(keys)
        self._scratch = pieces.Scratch()
        self.num_bytes, self.files = 0, set[str]()  # of the checked plan
        self._device_scratch: pieces.Scratch | None = None

    def check_plan(self, plan: LoadPlan) -> None:
        """Check the sizes of a plan's files and, with ``verify="before"``, their content."""
        for name, wanted in self._group_by_file(plan.items):
            self.num_bytes += sum(one.piece.length for one in wanted)
            self.files.add(name)
            end = max(one.piece.at + one.piece.length for one in wanted)
            problem = places.size_problem(self._directory / name, end, at_least=True)
            if problem is not None:
                keys = format_keys(one.key for one in wanted)
                raise CheckpointingException(f"{problem}; {keys}. Take another checkpoint")
            if self._verify == "before":
                with places.open_regular(self._directory / name) as stream:
                    for one in wanted:
                        self._check(stream, one)

    def read_objects(self, plan: LoadPlan, planner: Any) -> None:
        """Read the objects of a plan. Nothing is changed in place."""
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for name, wanted in self._group_by_file(items):
            with places.open_regular(self._directory / name) as stream:
                for one in wanted:
                    if self._verify == "while_reading":
                        self._check(stream, one)
                    if one.piece.transforms:
                        self._read_as_torch(one, planner)
                        continue
                    with self._name_problems(one):
                        content = pieces.FileSlice(stream, one.piece.at, one.piece.length).read()
                    try:
                        for item in one.items:
                            planner.load_bytes(item, io.BytesIO(content))
                    except CheckpointingException as error:
                        # Damage only if the bytes are not those that were saved.
                        self._check(stream, one)
                        raise IntactContentError(str(error)) from error

    def read_tensors(self, plan: LoadPlan, planner: Any, report: Callable[[int], object]) -> None:
        """Read the tensors of a plan into their targets. ``report`` gets the bytes of each."""
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        for name, wanted in self._group_by_file(items):
            targets = [planner.resolve_tensor(item) for one in wanted for item in one.items]
            end = 0
            with places.open_regular(self._directory / name) as stream:
                for one in wanted:
                    start, end = end, end + len(one.items)
                    self._read_tensor(stream, one, targets[start:end], planner)
                    report(one.piece.length)

    def _group_by_file(self, items: Sequence[ReadItem]) -> Iterator[tuple[str, list[_Wanted]]]:
        """Yield the pieces that items need, each once, in the order of the files."""
        users: dict[MetadataIndex, list[ReadItem]] = {}
        for item in items:
            users.setdefault(item.storage_index, []).append(item)
        keys, found = self._keys, self._pieces
        wanted = [_Wanted(found[at], keys[at.fqn].dtype, inside) for at, inside in users.items()]
        # Each file is read once, forwards, which is fastest on disks and at URLs.
        wanted.sort(key=lambda one: (one.piece.file, one.piece.at))
        for name, inside in groupby(wanted, lambda one: one.piece.file):
            yield name, list(inside)

    def _check(self, stream: io.RawIOBase, wanted: _Wanted) -> None:
        with self._name_problems(wanted):
            problem = piece_problem(
                stream, wanted.key, wanted.piece, self._index.has_checksums, self._scratch
            )
        if problem is not None:
            raise self._report_change(wanted, problem)

    def _report_change(self, wanted: _Wanted, problem: str) -> CheckpointingException:
        return CheckpointingException(
            f"{self._directory / wanted.piece.file}: the content of key {wanted.key!r} has changed "
            f"since it was saved ({problem}). Take another checkpoint"
        )

    @contextmanager
    def _name_problems(
        self, wanted: _Wanted, errors: tuple[type[Exception], ...] = (OSError, EOFError)
    ) -> Iterator[None]:
        try:
            yield
        except CheckpointingException:
            raise
        except errors as error:
            path = self._directory / wanted.piece.file
            cause = places.without_damage(path, error)
            raise CheckpointingException(
                f"{path}: key {wanted.key!r} cannot be read ({describe_error(error)})"
                f"{places.hint_at_another(cause)}"
            ) from cause

    def _read_tensor(
        self, stream: io.RawIOBase, wanted: _Wanted, targets: list[torch.Tensor], planner: Any
    ) -> None:
        piece, dtype = wanted.piece, wanted.dtype
        is_checked_while_copied = self._verify == "while_reading" and self._index.has_checksums
        if self._verify == "while_reading" and not is_checked_while_copied:
            self._check(stream, wanted)
        if piece.elements is None or dtype is None:
            if isinstance(self._directory, Path) or piece.transforms:
                self._read_as_torch(wanted, planner)
            else:
                self._read_archive(stream, wanted, planner)
            return
        parts = [
            pieces.Part(tuple(item.storage_offsets), target)
            for item, target in zip(wanted.items, targets, strict=True)
        ]
        scratch = self._scratch
        if not all(part.target.is_cpu for part in parts):
            scratch = self._device_scratch = self._device_scratch or pieces.Scratch(
                _DEVICE_SCRATCH_BYTES
            )
        first = piece.at + piece.elements
        narrow = [part for part in parts if _is_narrower(part.target.dtype, dtype)]
        with self._name_problems(wanted):
            if is_checked_while_copied:
                num_bytes = prod(piece.shape) * dtype.itemsize
                checked = pieces.CheckedStream(stream, piece.at, scratch)
                checked.skip(piece.elements)
                pieces.read_shard(checked, piece.shape, parts, dtype)
                checked.skip(piece.span - piece.elements - num_bytes)
                if checked.running.hexdigest() != piece.checksum:
                    raise self._report_change(wanted, "its checksum differs")
            else:
                for part in parts:
                    source = pieces.SkippingStream(stream, first, scratch)
                    pieces.read_shard(source, piece.shape, [part], dtype)
            for part in narrow:
                if not part.target.isinf().any():
                    continue
                exact = torch.empty(part.target.shape, dtype=dtype, device="cpu")
                source = pieces.SkippingStream(stream, first, self._scratch)
                pieces.read_shard(source, piece.shape, [pieces.Part(part.start, exact)], dtype)
                if (exact.isfinite() & part.target.cpu().isinf()).any():
                    warnings.warn(
                        f"key {wanted.key!r}: finite values became infinite, since their {dtype} "
                        f"was cast to {part.target.dtype}. Load into a dtype of a larger range",
                        stacklevel=2,
                    )

    def _read_archive(self, stream: io.RawIOBase, wanted: _Wanted, planner: Any) -> None:
        """Read an archive that torch's writer made, which may contain more than the elements."""
        with self._name_problems(wanted, (Exception,)):
            content = pieces.FileSlice(stream, wanted.piece.at, wanted.piece.length).read()
            whole = ShardedObject.decode(io.BytesIO(content))
            for item in wanted.items:
                source = whole
                for dim, start in enumerate(item.storage_offsets):
                    source = source.narrow(dim, start, item.lengths[dim])
                planner.resolve_tensor(item).copy_(source)

    def _read_as_torch(self, wanted: _Wanted, planner: Any) -> None:
        """Read an archive by torch's reader, which undoes transforms such as compression."""
        if not isinstance(self._directory, Path):
            raise IntactContentError(
                f"{self._directory}: key {wanted.key!r} was stored through "
                f"{', '.join(wanted.piece.transforms)}. Load it from a copy on a local file system"
            )
        reader = FileSystemReader(self._directory)
        place = file_part_type()(wanted.piece.file, wanted.piece.at, wanted.piece.length)
        if wanted.piece.transforms:
            place.transform_descriptors = list(wanted.piece.transforms)
        places = {item.storage_index: place for item in wanted.items}
        reader.set_up_storage_reader(Metadata({}, storage_data=places), False)
        with self._name_problems(wanted, (Exception,)):
            reader.read_data(LoadPlan(wanted.items), planner).wait()
