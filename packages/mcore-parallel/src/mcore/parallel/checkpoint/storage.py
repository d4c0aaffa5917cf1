"""Write a checkpoint so that it appears whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

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
from mcore.parallel.torch_compat import METADATA_FILE

__all__ = ["DurableWriter", "RankWrites"]


@dataclass(frozen=True)
class RankWrites:
    """What a rank wrote.

    Attributes:
        results: Where each item is.
        files: The rank's files by name.
    """

    results: list[WriteResult]
    files: dict[str, FileRecord]


class DurableWriter:
    """Writes beside the final directory and renames once all ranks have synced their files.

    Args:
        incomplete: Where to write.
        final: The name that the directory gets in the end.
        rank: This rank in the group that saves.
    """

    def __init__(self, incomplete: Path, final: Path, rank: int) -> None:
        self._incomplete = incomplete
        self._final = final
        self._file = RankFile(incomplete / f"__{rank}_0.distcp")

    def begin(self) -> None:
        """Make the directory, on every rank: each may see it later than another has made it."""
        self._incomplete.mkdir(exist_ok=True)

    def write(self, plan: SavePlan, planner: SavePlanner) -> RankWrites:
        """Write and sync this rank's file; a rank with nothing to write makes none.

        Raises:
            CheckpointingException: It cannot be written; the text has file and key.
        """
        if not plan.items:
            return RankWrites([], {})
        try:
            results = self._file.write(plan, planner)
            with _synced_meanwhile(self._file.path):
                record = self._file.record()
            sync_directory(self._incomplete)
        except CheckpointingException:
            raise
        except Exception as error:
            raise _unwritten(error, self._file.path, self._file.key) from error
        return RankWrites(results, {self._file.path.name: record})

    def publish(self, metadata: Metadata, writes: list[RankWrites]) -> None:
        """Write index and manifest and rename the directory; one rank, after all have written.

        Raises:
            CheckpointingException: A rank's file is not here, or one cannot be written.
        """
        files = {name: record for one in writes for name, record in one.files.items()}
        for name, record in files.items():
            problem = size_problem(self._incomplete / name, record.size)
            if problem is not None:
                raise CheckpointingException(
                    f"{problem} (all ranks must write to one shared file system)"
                )
        path = self._incomplete / METADATA_FILE
        try:
            _IndexWriter(self._incomplete, self._final).finish(
                metadata, [one.results for one in writes]
            )
            sync_file(path)
            files[METADATA_FILE] = whole_file(path.read_bytes())
            path = self._incomplete / MANIFEST_FILE
            write_manifest(self._incomplete, files)
        except Exception as error:
            raise _unwritten(error, path) from error
        publish(self._incomplete, self._final)


class _IndexWriter(FileSystemWriter):
    """Writes the index of a directory that will have another name."""

    def __init__(self, directory: Path, final: Path) -> None:
        super().__init__(directory, sync_files=False)
        self._final = final

    def storage_meta(self) -> StorageMeta:
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
