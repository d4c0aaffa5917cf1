"""Write a checkpoint so that it appears whole or not at all, and read only what is whole."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore.parallel.checkpoint.durable_files import publish, sync_directory, sync_file
from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.file_slice import FileSlice
from mcore.parallel.checkpoint.manifest import size_problem, write_manifest
from mcore.parallel.checkpoint.torch_private import METADATA_FILE

__all__ = ["CheckedReader", "DurableWriter"]


@dataclass(frozen=True)
class _RankWrites:
    """What a rank wrote, and the sizes of its files by name."""

    results: list[WriteResult]
    sizes: dict[str, int]


class DurableWriter(FileSystemWriter):
    """Writes beside the final directory and renames once all ranks have synced their files.

    Args:
        incomplete: Where to write.
        final: The name that the directory gets in the end.
        copy_ahead_bytes: How much to copy from an accelerator while writing; 0 touches none.
    """

    def __init__(self, incomplete: Path, final: Path, copy_ahead_bytes: int) -> None:
        # Files are synced here: torch's own sync comes before the last buffered bytes are written.
        super().__init__(incomplete, sync_files=False, per_thread_copy_ahead=copy_ahead_bytes)
        self._incomplete = incomplete
        self._final = final

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write and sync this rank's file; a rank with nothing to write makes none."""
        try:
            writes = self._written(plan, planner) if plan.items else _RankWrites([], {})
        except CheckpointingException:
            raise
        except Exception as error:
            # Every rank gets the error pickled, which not every exception survives.
            raise CheckpointingException(
                f"{self._incomplete} cannot be written ({describe_error(_origin(error))})"
            ) from error
        future: Future[Any] = Future()
        future.set_result(writes)
        return future

    def _written(self, plan: SavePlan, planner: SavePlanner) -> _RankWrites:
        results = super().write_data(plan, planner).wait()
        sizes = {}
        for name in {result.storage_data.relative_path for result in results}:
            sync_file(self._incomplete / name)
            sizes[name] = (self._incomplete / name).stat().st_size
        sync_directory(self._incomplete)
        return _RankWrites(results, sizes)

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write index and manifest and publish the directory; one rank, after all have written."""
        super().finish(metadata, [writes.results for writes in results])
        sync_file(self._incomplete / METADATA_FILE)
        sizes = {name: size for writes in results for name, size in writes.sizes.items()}
        for name, size in sizes.items():
            problem = size_problem(self._incomplete / name, size)
            if problem is not None:
                raise CheckpointingException(
                    f"{problem} (all ranks must write to one shared file system)"
                )
        sizes[METADATA_FILE] = (self._incomplete / METADATA_FILE).stat().st_size
        write_manifest(self._incomplete, sizes)
        publish(self._incomplete, self._final)

    def storage_meta(self) -> StorageMeta:
        """Name the directory as it will be called."""
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


class CheckedReader(FileSystemReader):
    """Reads a checkpoint of which everything a rank needs was checked before.

    Args:
        directory: The checkpoint.
        metadata: Its index.
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._directory = directory
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
        for name, indices in needed.items():
            places = [self.storage_data[index] for index in indices]
            end = max(place.offset + place.length for place in places)
            problem = size_problem(self._directory / name, end, at_least=True)
            if problem is not None:
                raise CheckpointingException(problem)
            if verify_checksums:
                self._check_content(self._directory / name, list(indices))

    def _check_content(self, path: Path, indices: list[MetadataIndex]) -> None:
        with path.open("rb", buffering=0) as stream:
            for index in sorted(indices, key=lambda index: int(self.storage_data[index].offset)):
                place = self.storage_data[index]
                if place.transform_descriptors:
                    continue
                problem = _archive_problem(FileSlice(stream, place.offset, place.length))
                if problem is not None:
                    raise CheckpointingException(
                        f"{path}: the content of key {index.fqn!r} has changed since it was saved "
                        f"({problem}); take another checkpoint"
                    )

    def read_tensors(self, plan: LoadPlan, planner: Any) -> None:
        """Read the tensors of a plan into their targets."""
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        self._read(items, planner)

    def read_objects(self, plan: LoadPlan, planner: Any) -> None:
        """Read the objects of a plan; nothing in place is changed by it."""
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        self._read(items, planner)

    def _read(self, items: list[Any], planner: Any) -> None:
        try:
            self.read_data(LoadPlan(items), planner).wait()
        except CheckpointingException:
            raise
        except Exception as error:
            raise CheckpointingException(
                f"{self._directory} cannot be read ({describe_error(error)}); take another "
                "checkpoint"
            ) from error


def _archive_problem(stream: Any) -> str | None:
    """Compare the checksums in an archive of torch.save with its content."""
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except Exception as error:
        return describe_error(error)
    return None if damaged is None else f"checksum of {damaged}"


def _origin(error: BaseException) -> BaseException:
    """Return the operating system's error behind what torch.save makes of it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error
