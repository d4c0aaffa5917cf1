"""A save on disk: each rank's file, then index, manifest and the rename that publishes them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.archive import elements_at
from mcore.parallel.checkpoint.files.checksums import Scratch, checksum_of_piece
from mcore.parallel.checkpoint.files.durable_files import (
    new_large_file,
    publish,
    sync_directory,
    sync_file,
)
from mcore.parallel.checkpoint.files.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Piece,
    size_problem,
    whole_file,
    write_manifest,
)
from mcore.parallel.torch_compat import METADATA_FILE, file_part

_ALIGNMENT_BYTES = 64  # as in archives of torch.save: memory is copied half as fast from odd places
Content = torch.Tensor | io.BytesIO


class RankWrites(NamedTuple):
    """What a rank wrote: where each item is, and its files by name."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


class DurableWriter:
    """Writes beside the final directory, which gets its name once all files are on storage."""

    def __init__(self, incomplete: Path, final: Path, rank: int) -> None:
        self._incomplete = incomplete
        self._final = final
        self._file = _RankFile(incomplete / f"__{rank}_0.distcp")

    def begin(self) -> None:
        """Make the directory, on every rank: one may see it only after another has made it."""
        self._incomplete.mkdir(exist_ok=True)

    def write(self, plan: SavePlan, planner: SavePlanner) -> RankWrites:
        """Write and sync this rank's file; a rank with nothing to write makes none."""
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
        """Write index and manifest and rename the directory; one rank, after all have written."""
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


class _RankFile:
    """The file that one rank writes in a save: objects, then tensors, each as an archive.

    ``key`` is that of the content that was requested or written last, None before the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key: str | None = None
        self._results: list[WriteResult] = []
        self._bytes_of_elements: dict[MetadataIndex, int] = {}

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write what a plan lists, and return where each item is."""
        with new_large_file(self.path) as stream:
            for item, content in self._contents(plan, planner):
                self._results.append(self._written(stream, item, content))
        return self._results

    def record(self) -> FileRecord:
        """Read the file again and describe what it holds."""
        scratch, pieces, size = Scratch(), [], self.path.stat().st_size
        places = [result.storage_data for result in self._results]
        ends = [place.offset for place in places[1:]] + [size]
        with self.path.open("rb", buffering=0) as stream:
            for result, place, end in zip(self._results, places, ends, strict=True):
                elements = None
                if result.index in self._bytes_of_elements:
                    num_bytes = self._bytes_of_elements[result.index]
                    elements = elements_at(stream, place.offset, place.length, num_bytes)
                length = end - place.offset
                checksum = checksum_of_piece(stream, place.offset, length, scratch)
                pieces.append(Piece(place.offset, length, checksum, elements))
        return FileRecord(size, tuple(pieces))

    def _contents(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Iterator[tuple[WriteItem, Content]]:
        """Yield objects, then tensors, each of which is copied while the one before is written."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.key = item.index.fqn
                yield item, cast(io.BytesIO, planner.resolve_data(item))
        copies = self._started_copies(plan, planner)
        ahead = next(copies, None)
        while ahead is not None:
            (item, finish), ahead = ahead, next(copies, None)
            self.key = item.index.fqn
            yield item, finish()

    def _started_copies(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Iterator[tuple[WriteItem, Callable[[], torch.Tensor]]]:
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                self.key = item.index.fqn
                tensor = cast(torch.Tensor, planner.resolve_data(item))
                yield item, _copy_to_cpu(tensor.detach())

    def _written(self, stream: BinaryIO, item: WriteItem, content: Content) -> WriteResult:
        stream.write(bytes(-stream.tell() % _ALIGNMENT_BYTES))
        offset = stream.tell()
        if isinstance(content, torch.Tensor):
            torch.save(content, stream)
            self._bytes_of_elements[item.index] = content.nbytes
        else:
            stream.write(content.getbuffer())
        length = stream.tell() - offset
        return WriteResult(item.index, length, file_part(self.path.name, offset, length))


class _IndexWriter(FileSystemWriter):
    """A writer of the index of a directory that will have another name."""

    def __init__(self, directory: Path, final: Path) -> None:
        super().__init__(directory, sync_files=False)
        self._final = final

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


def _copy_to_cpu(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the CPU; the returned function waits for and returns the copy."""
    if tensor.is_cpu:
        return lambda: _without_neighbours(tensor)
    copy = tensor.to("cpu", non_blocking=True)
    event = torch.accelerator.current_stream(tensor.device).record_event()

    def finished() -> torch.Tensor:
        event.synchronize()
        return copy

    return finished


def _without_neighbours(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its storage for itself: archives hold storages as a whole."""
    alone = tensor.untyped_storage().nbytes() == prod(tensor.shape) * tensor.itemsize
    return tensor if alone else tensor.clone()


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


def _unwritten(error: Exception, path: Path, key: str | None = None) -> CheckpointingException:
    """Turn an error into one of ours, since not every exception can be sent to the other ranks."""
    at = f" at key {key!r}" if key is not None else ""
    return CheckpointingException(
        f"{path} cannot be written{at} ({describe_error(_origin(error))})"
    )


def _origin(error: BaseException) -> BaseException:
    """Return the operating system's error behind the one that torch.save raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error
