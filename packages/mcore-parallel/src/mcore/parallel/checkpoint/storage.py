"""Write a checkpoint so that it appears whole or not at all."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore.parallel.checkpoint.archive import elements_at
from mcore.parallel.checkpoint.checksums import checksum_of_part
from mcore.parallel.checkpoint.durable_files import publish, sync_directory, sync_file
from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Part,
    size_problem,
    whole_file,
    write_manifest,
)
from mcore.parallel.checkpoint.raw_reads import Scratch
from mcore.parallel.checkpoint.torch_private import METADATA_FILE

__all__ = ["DurableWriter"]


class _NotingFileSystem(FileSystem):
    """The file system of the operating system; it knows which file was opened last."""

    def __init__(self, directory: Path) -> None:
        self.last = directory

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        self.last = Path(path)
        with super().create_stream(path, mode) as stream:
            yield stream


@dataclass(frozen=True)
class _RankWrites:
    """What a rank wrote, and its files by name."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


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
        self.fs = self._files = _NotingFileSystem(incomplete)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write and sync this rank's file; a rank with nothing to write makes none."""
        try:
            writes = self._written(plan, planner) if plan.items else _RankWrites([], {})
        except CheckpointingException:
            raise
        except Exception as error:
            # Every rank gets the error pickled, which not every exception survives.
            raise self._unwritten(error, getattr(planner, "resolving", None)) from error
        future: Future[Any] = Future()
        future.set_result(writes)
        return future

    def _unwritten(self, error: Exception, key: str | None = None) -> CheckpointingException:
        at = f" at key {key!r}" if key is not None else ""
        reason = describe_error(_origin(error))
        return CheckpointingException(f"{self._files.last} cannot be written{at} ({reason})")

    def _written(self, plan: SavePlan, planner: SavePlanner) -> _RankWrites:
        results = super().write_data(plan, planner).wait()
        bytes_of_elements = _bytes_of_elements(plan)
        files = {}
        for name in sorted({result.storage_data.relative_path for result in results}):
            path = self._incomplete / name
            inside = [result for result in results if result.storage_data.relative_path == name]
            with _synced_meanwhile(path):
                files[name] = _file_record(path, inside, bytes_of_elements)
        sync_directory(self._incomplete)
        return _RankWrites(results, files)

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write index and manifest and publish the directory; one rank, after all have written."""
        files = {name: record for writes in results for name, record in writes.files.items()}
        for name, record in files.items():
            problem = size_problem(self._incomplete / name, record.size)
            if problem is not None:
                raise CheckpointingException(
                    f"{problem} (all ranks must write to one shared file system)"
                )
        try:
            super().finish(metadata, [writes.results for writes in results])
            sync_file(self._incomplete / METADATA_FILE)
            files[METADATA_FILE] = whole_file((self._incomplete / METADATA_FILE).read_bytes())
            self._files.last = self._incomplete / MANIFEST_FILE
            write_manifest(self._incomplete, files)
        except Exception as error:
            raise self._unwritten(error) from error
        publish(self._incomplete, self._final)

    def storage_meta(self) -> StorageMeta:
        """Name the directory as it will be called."""
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


@contextmanager
def _synced_meanwhile(path: Path) -> Iterator[None]:
    """Sync a file while the block runs, which reads its content from memory."""
    problems: list[OSError] = []

    def sync() -> None:
        try:
            sync_file(path)
        except OSError as error:
            problems.append(error)

    # A thread pool takes no work while the interpreter waits for a background save to end.
    thread = threading.Thread(target=sync, name=f"sync-{path.name}")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if problems:
        raise problems[0]


def _bytes_of_elements(plan: SavePlan) -> dict[MetadataIndex, int]:
    """Return how many bytes the elements of each tensor of a plan have."""
    return {
        item.index: prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        for item in plan.items
        if item.tensor_data is not None
    }


def _file_record(
    path: Path, results: list[WriteResult], bytes_of_elements: dict[MetadataIndex, int]
) -> FileRecord:
    """Describe a file that was written."""
    scratch = Scratch()
    parts = []
    with path.open("rb", buffering=0) as stream:
        for result in results:
            offset, length = result.storage_data.offset, result.storage_data.length
            elements = None
            if result.index in bytes_of_elements:
                elements = elements_at(stream, offset, length, bytes_of_elements[result.index])
            checksum = checksum_of_part(stream, offset, length, scratch)
            parts.append(Part(offset, length, checksum, elements))
    return FileRecord(path.stat().st_size, tuple(parts))


def _origin(error: BaseException) -> BaseException:
    """Return the operating system's error behind what torch.save makes of it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error
