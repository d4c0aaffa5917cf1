"""Loads from disk, with a check of everything before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.archive import FileSlice, archive_problem
from mcore.parallel.checkpoint.files.checksums import (
    Scratch,
    Unbuffered,
    checksum_of_piece,
    read_exactly,
)
from mcore.parallel.checkpoint.files.manifest import FileRecords, Piece, size_problem
from mcore.parallel.checkpoint.files.metadata_file import keys_text
from mcore.parallel.tensor_memory import memory_of

_SCRATCH_BYTES = 1 << 25  # on the way to an accelerator, for which few large copies are fastest


class CheckedReader(FileSystemReader):
    """Reads a checkpoint after checking what a rank needs of it.

    ``files`` is the manifest; None where torch.distributed.checkpoint wrote it by itself.
    """

    def __init__(self, directory: Path, metadata: Metadata, files: FileRecords | None) -> None:
        super().__init__(directory)
        self._directory = directory
        self._metadata = metadata
        self._pieces = {
            (name, piece.offset): piece
            for name, record in (files or {}).items()
            for piece in record.pieces
        }
        self._has_manifest = files is not None
        self.set_up_storage_reader(metadata, False)

    def check_plan(self, plan: LoadPlan, *, verify_checksums: bool) -> None:
        """Check the size of what a plan reads, and its content by reading it once."""
        needed: dict[str, dict[MetadataIndex, None]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            needed.setdefault(place.relative_path, {})[item.storage_index] = None
        scratch = Scratch()
        for name, indices in needed.items():
            places = [self.storage_data[index] for index in indices]
            end = max(place.offset + place.length for place in places)
            problem = size_problem(self._directory / name, end, at_least=True)
            if problem is not None:
                keys = keys_text(index.fqn for index in indices)
                raise CheckpointingException(f"{problem}; {keys}; take another checkpoint")
            if verify_checksums:
                self._check_content(self._directory / name, list(indices), scratch)

    def _check_content(self, path: Path, indices: list[MetadataIndex], scratch: Scratch) -> None:
        with path.open("rb", buffering=0) as stream:
            for index in sorted(indices, key=lambda index: int(self.storage_data[index].offset)):
                problem = self._content_problem(stream, index, scratch)
                if problem is not None:
                    raise CheckpointingException(
                        f"{path}: the content of key {index.fqn!r} has changed since it was saved "
                        f"({problem}); take another checkpoint"
                    )

    def _content_problem(self, stream: Any, index: MetadataIndex, scratch: Scratch) -> str | None:
        place = self.storage_data[index]
        if not self._has_manifest:
            if place.transform_descriptors:
                return None
            return archive_problem(FileSlice(stream, place.offset, place.length))
        piece = self._piece_of(index)
        if piece is None:
            return "the manifest does not list it"
        try:
            found = checksum_of_piece(stream, piece.offset, piece.length, scratch)
        except (OSError, EOFError) as error:
            return describe_error(error)
        return None if found == piece.checksum else "its checksum differs"

    def _piece_of(self, index: MetadataIndex) -> Piece | None:
        place = self.storage_data[index]
        piece = self._pieces.get((place.relative_path, place.offset))
        return None if piece is None or piece.length < place.length else piece

    def read_objects(self, plan: LoadPlan, planner: Any) -> None:
        """Read the objects of a plan; nothing is changed in place."""
        self._read([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)

    def read_tensors(self, plan: LoadPlan, planner: Any) -> None:
        """Read the tensors of a plan into their targets."""
        direct: list[ReadItem] = []
        indirect: list[ReadItem] = []
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                piece = self._piece_of(item.storage_index)
                is_located = piece is not None and piece.elements_at is not None
                (direct if is_located else indirect).append(item)
        self._read_direct(direct, planner)
        self._read(indirect, planner)

    def _read_direct(self, items: list[ReadItem], planner: Any) -> None:
        """Read tensors whose elements the manifest locates, in the order of the files."""
        stored = self._stored_shards(items)
        scratches: dict[str, Scratch] = {}
        places = {id(item): self.storage_data[item.storage_index] for item in items}
        in_order = sorted(
            items, key=lambda item: (places[id(item)].relative_path, places[id(item)].offset)
        )
        for name, inside in groupby(in_order, lambda item: places[id(item)].relative_path):
            with (self._directory / name).open("rb", buffering=0) as stream:
                for item in inside:
                    target = planner.resolve_tensor(item).detach()
                    kind = target.device.type
                    if kind not in scratches:
                        scratches[kind] = Scratch() if kind == "cpu" else Scratch(_SCRATCH_BYTES)
                    shape, dtype = stored[item.storage_index]
                    self._read_item(stream, item, shape, dtype, target, scratches[kind])
                    planner.commit_tensor(item, target)

    def _read_item(
        self,
        stream: Any,
        item: ReadItem,
        shape: Sequence[int],
        dtype: torch.dtype,
        target: torch.Tensor,
        scratch: Scratch,
    ) -> None:
        piece = self._piece_of(item.storage_index)
        if piece is None or piece.elements_at is None:
            raise CheckpointingException(f"key {item.storage_index.fqn!r} is not a tensor")
        start = item.storage_offsets
        try:
            read_slice(stream, piece.elements_at, shape, start, target, dtype, scratch)
        except (OSError, EOFError) as error:
            name = self.storage_data[item.storage_index].relative_path
            raise CheckpointingException(
                f"{self._directory / name}: key {item.storage_index.fqn!r} cannot be read "
                f"({describe_error(error)}); take another checkpoint"
            ) from error

    def _stored_shards(
        self, items: list[ReadItem]
    ) -> dict[MetadataIndex, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of every stored shard of the keys that are read."""
        shards = {}
        for name in {item.storage_index.fqn for item in items}:
            saved = self._metadata.state_dict_metadata[name]
            if isinstance(saved, TensorStorageMetadata):
                for chunk in saved.chunks:
                    index = MetadataIndex(name, chunk.offsets)
                    shards[index] = (tuple(chunk.sizes), saved.properties.dtype)
        return shards

    def _read(self, items: list[ReadItem], planner: Any) -> None:
        try:
            self.read_data(LoadPlan(items), planner).wait()
        except CheckpointingException:
            raise
        except Exception as error:
            raise CheckpointingException(
                f"{self._directory} cannot be read ({describe_error(error)}); take another "
                "checkpoint"
            ) from error


def read_slice(
    stream: Unbuffered,
    elements_at: int,
    shape: Sequence[int],
    start: Sequence[int],
    target: torch.Tensor,
    dtype: torch.dtype,
    scratch: Scratch,
) -> None:
    """Fill a tensor with a slice, from ``start`` on, of one of ``shape`` stored in row-major order.

    The target has any device, strides and floating-point dtype, or ``dtype``, the stored one.
    """
    if not shape:
        shape, start, target = (1,), (0,), target.unsqueeze(0)
    row_bytes = prod(shape[1:]) * dtype.itemsize
    if _lies_alike(shape, target, dtype):
        read_exactly(stream, elements_at + start[0] * row_bytes, memory_of(target))
        target[:0].zero_()  # autograd counts changes and has not seen this one
        return
    if len(shape) > 1 and row_bytes > scratch.tensor.numel():
        for row in range(target.shape[0]):
            at = elements_at + (start[0] + row) * row_bytes
            read_slice(stream, at, shape[1:], start[1:], target[row], dtype, scratch)
        return
    step = scratch.tensor.numel() // row_bytes
    for first in range(0, target.shape[0], step):
        count = min(step, target.shape[0] - first)
        num_bytes = count * row_bytes
        scratch.fill(stream, elements_at + (start[0] + first) * row_bytes, num_bytes)
        rows = scratch.tensor[:num_bytes].view(dtype).view(count, *shape[1:])
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, start[dim], target.shape[dim])
        target.narrow(0, first, count).copy_(rows)


def _lies_alike(shape: Sequence[int], target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the bytes of a target are those of the file, one after the other."""
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and tuple(target.shape[1:]) == tuple(shape[1:])
    )
