"""Write a checkpoint so that it appears whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore.parallel.checkpoint.durable_files import publish, sync_directory, sync_file
from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.manifest import (
    MANIFEST_FILE,
    FileRecord,
    size_problem,
    whole_file,
    write_manifest,
)
from mcore.parallel.checkpoint.rank_file import RankFile
from mcore.parallel.checkpoint.torch_private import METADATA_FILE, rank_file_name

__all__ = ["DurableWriter"]


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
    """

    def __init__(self, incomplete: Path, final: Path) -> None:
        super().__init__(incomplete, sync_files=False)
        self._incomplete = incomplete
        self._final = final

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write and sync this rank's file; a rank with nothing to write makes none."""
        writes = _RankWrites([], {})
        if plan.items:
            file = RankFile(self._incomplete / rank_file_name(plan))
            try:
                writes = self._written(file, plan, planner)
            except CheckpointingException:
                raise
            except Exception as error:
                raise _unwritten(error, file.path, file.key) from error
        future: Future[Any] = Future()
        future.set_result(writes)
        return future

    def _written(self, file: RankFile, plan: SavePlan, planner: SavePlanner) -> _RankWrites:
        results = file.write(plan, planner)
        with _synced_meanwhile(file.path):
            files = {file.path.name: file.record()}
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
        path = self._incomplete / METADATA_FILE
        try:
            super().finish(metadata, [writes.results for writes in results])
            sync_file(path)
            files[METADATA_FILE] = whole_file(path.read_bytes())
            path = self._incomplete / MANIFEST_FILE
            write_manifest(self._incomplete, files)
        except Exception as error:
            raise _unwritten(error, path) from error
        publish(self._incomplete, self._final)

    def storage_meta(self) -> StorageMeta:
        """Name the directory as it will be called."""
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


def _unwritten(error: Exception, path: Path, key: str | None = None) -> CheckpointingException:
    """Describe an error, which every rank gets pickled, and not every exception survives that."""
    at = f" at key {key!r}" if key is not None else ""
    return CheckpointingException(
        f"{path} cannot be written{at} ({describe_error(_origin(error))})"
    )


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


def _origin(error: BaseException) -> BaseException:
    """Return the operating system's error behind what torch.save makes of it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error
