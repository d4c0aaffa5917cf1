"""Read a checkpoint of which everything that is read was checked before."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mcore.parallel.checkpoint.box_reading import read_box
from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.file_slice import FileSlice
from mcore.parallel.checkpoint.files.archive import archive_problem
from mcore.parallel.checkpoint.files.checksums import checksum_of_part
from mcore.parallel.checkpoint.files.manifest import FileRecords, Part, size_problem
from mcore.parallel.checkpoint.files.metadata_file import keys_text
from mcore.parallel.checkpoint.raw_reads import Scratch

__all__ = ["CheckedReader"]

_SCRATCH_BYTES = 1 << 25  # on the way to an accelerator, which likes few and large copies


class CheckedReader(FileSystemReader):
    """Reads a checkpoint after checking what a rank needs of it.

    Args:
        directory: The checkpoint.
        metadata: Its index.
        files: Its manifest; None where torch.distributed.checkpoint wrote it by itself.
    """

    def __init__(self, directory: Path, metadata: Metadata, files: FileRecords | None) -> None:
        super().__init__(directory)
        self._directory = directory
        self._metadata = metadata
        self._parts = {
            (name, part.offset): part
            for name, record in (files or {}).items()
            for part in record.parts
        }
        self._has_manifest = files is not None
        self.set_up_storage_reader(metadata, False)

    def check_plan(self, plan: LoadPlan, *, verify_checksums: bool) -> None:
        """Check size and content of what a plan reads.

        Args:
            plan: What this rank reads.
            verify_checksums: Whether to read the content once and compare its checksums.

        Raises:
            CheckpointingException: A file is missing, too short, or its content has changed.
        """
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
        part = self._part_of(index)
        if part is None:
            return "the manifest does not list it"
        try:
            found = checksum_of_part(stream, part.offset, part.length, scratch)
        except (OSError, EOFError) as error:
            return describe_error(error)
        return None if found == part.checksum else "its checksum differs"

    def _part_of(self, index: MetadataIndex) -> Part | None:
        place = self.storage_data[index]
        part = self._parts.get((place.relative_path, place.offset))
        return None if part is None or part.length < place.length else part

    def read_objects(self, plan: LoadPlan, planner: Any) -> None:
        """Read the objects of a plan; nothing in place is changed by it."""
        self._read([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)

    def read_tensors(self, plan: LoadPlan, planner: Any) -> None:
        """Read the tensors of a plan into their targets."""
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        direct = {id(item) for item in tensors if self._elements_at(item) is not None}
        self._read_direct([item for item in tensors if id(item) in direct], planner)
        self._read([item for item in tensors if id(item) not in direct], planner)

    def _elements_at(self, item: ReadItem) -> int | None:
        part = self._part_of(item.storage_index)
        return None if part is None else part.elements_at

    def _read_direct(self, items: list[ReadItem], planner: Any) -> None:
        """Read tensors whose elements the manifest locates, in the order of the files."""
        shapes = self._stored_shapes(items)
        places = [self.storage_data[item.storage_index] for item in items]
        order = sorted(
            range(len(items)), key=lambda at: (places[at].relative_path, places[at].offset)
        )
        scratches: dict[str, Scratch] = {}
        with ExitStack() as stack:
            name, stream = "", None
            for at in order:
                if places[at].relative_path != name:
                    stack.close()
                    name = places[at].relative_path
                    stream = stack.enter_context((self._directory / name).open("rb", buffering=0))
                target = planner.resolve_tensor(items[at]).detach()
                kind = target.device.type
                if kind not in scratches:
                    scratches[kind] = Scratch() if kind == "cpu" else Scratch(_SCRATCH_BYTES)
                self._read_item(stream, items[at], shapes, target, scratches[kind])
                planner.commit_tensor(items[at], target)

    def _read_item(
        self,
        stream: Any,
        item: ReadItem,
        shapes: dict[MetadataIndex, tuple[int, ...]],
        target: torch.Tensor,
        scratch: Scratch,
    ) -> None:
        index = item.storage_index
        saved = self._metadata.state_dict_metadata[index.fqn]
        at = self._elements_at(item)
        if at is None or not isinstance(saved, TensorStorageMetadata):
            raise CheckpointingException(f"key {index.fqn!r} is no tensor")
        try:
            read_box(
                stream,
                at,
                shapes[index],
                item.storage_offsets,
                target,
                saved.properties.dtype,
                scratch,
            )
        except (OSError, EOFError) as error:
            name = self.storage_data[index].relative_path
            raise CheckpointingException(
                f"{self._directory / name}: key {index.fqn!r} cannot be read "
                f"({describe_error(error)}); take another checkpoint"
            ) from error

    def _stored_shapes(self, items: list[ReadItem]) -> dict[MetadataIndex, tuple[int, ...]]:
        """Return the shape of every stored part that is read."""
        sizes: dict[MetadataIndex, tuple[int, ...]] = {}
        for name in {item.storage_index.fqn for item in items}:
            saved = self._metadata.state_dict_metadata[name]
            for chunk in getattr(saved, "chunks", ()):
                sizes[MetadataIndex(name, chunk.offsets)] = tuple(chunk.sizes)
        return sizes

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
