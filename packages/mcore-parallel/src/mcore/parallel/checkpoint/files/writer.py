"""The files of a save: one of each rank, then torch's index and the manifest."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.index import OUR_MARK
from mcore.parallel.checkpoint.files.manifest import (
    ALIGNMENT_BYTES,
    MANIFEST_FILE,
    FileRecord,
    Piece,
    encode_manifest,
)
from mcore.parallel.checkpoint.files.pieces import RunningChecksum, checksum_of, write_tensor
from mcore.parallel.checkpoint.files.places import Place, size_problems
from mcore.parallel.checkpoint.files.save_place import LocalSave, RemoteSave
from mcore.parallel.checkpoint.host_copies import host_copies_so_far, start_host_copy
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.torch_compat import METADATA_FILE, file_part

Content = torch.Tensor | io.BytesIO


class RankWrites(NamedTuple):
    """The result of a rank's writes: the location of each item, and its files by name."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


class DurableWriter:
    """Writes the files of a save. They become a checkpoint when all are on storage."""

    def __init__(self, save: LocalSave | RemoteSave, rank: int) -> None:
        self._save = save
        self._file = _RankFile(save, rank)

    def begin(self) -> None:
        """Make the directory, on every rank."""
        self._save.begin()

    def write(self, plan: SavePlan, planner: SavePlanner) -> RankWrites:
        """Write and sync this rank's file. An empty plan makes no file."""
        if not plan.items:
            return RankWrites([], {})
        try:
            record = self._file.write(plan, planner)
        except CheckpointingException:
            raise
        except Exception as error:
            raise _name_failure(error, self._file.path, self._file.key) from error
        return RankWrites(self._file.results, {self._file.path.name: record})

    def publish(self, metadata: Metadata, writes: list[RankWrites]) -> None:
        """Write index and manifest and publish the checkpoint. One rank, after all have written."""
        folder = self._save.folder
        files = {name: record for one in writes for name, record in one.files.items()}
        sizes = {name: record.size for name, record in files.items()}
        for _, problem in size_problems(folder, sizes):
            raise CheckpointingException(
                f"{problem} (all ranks must write to one shared file system)"
            )

        def write_index(directory: Path) -> None:
            results = [one.results for one in writes]
            _IndexWriter(directory, self._save.final).finish(metadata, results)

        path = folder / METADATA_FILE
        try:
            index = self._save.write_index(write_index)
            whole = {METADATA_FILE: (len(index), checksum_of(index))}
            keys = {
                key: (str(saved.properties.dtype).removeprefix("torch."), tuple(saved.size))
                if isinstance(saved, TensorStorageMetadata)
                else ("", ())
                for key, saved in metadata.state_dict_metadata.items()
            }
            manifest = encode_manifest(keys, files, whole)
            path = folder / MANIFEST_FILE
            self._save.write_manifest(manifest)
        except CheckpointingException:
            raise
        except Exception as error:
            raise _name_failure(error, path) from error
        self._save.publish({**sizes, METADATA_FILE: len(index), MANIFEST_FILE: len(manifest)})


class _RankFile:
    """The file that one rank writes in a save: objects, then tensors, each as an archive.

    ``key`` is the key of the content that was requested or written last, None before the first.
    """

    def __init__(self, save: LocalSave | RemoteSave, rank: int) -> None:
        self.path: Place = save.file_of(rank)
        self._open = partial(save.new_file, rank)
        self.key: str | None = None
        self.results: list[WriteResult] = []
        self._pieces: list[tuple[str, Piece]] = []

    def write(self, plan: SavePlan, planner: SavePlanner) -> FileRecord:
        """Write the items of a plan, with checksums, and wait until they are on storage."""
        with self._open() as stream:
            checked = _ChecksummedStream(stream)
            for item, content in self._iterate_contents(plan, planner):
                self._write_piece(checked, item, content)
            self._end_piece(checked)
            size = checked.tell()
        return FileRecord(size, self._pieces)

    def _iterate_contents(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Iterator[tuple[WriteItem, Content]]:
        """Yield objects, then tensors. Each tensor is copied while the previous one is written."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.key = item.index.fqn
                yield item, cast(io.BytesIO, planner.resolve_data(item))
        copies = self._start_copies(plan, planner)
        ahead = next(copies, None)
        while ahead is not None:
            (item, finish), ahead = ahead, next(copies, None)
            self.key = item.index.fqn
            yield item, finish()

    def _start_copies(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Iterator[tuple[WriteItem, Callable[[], torch.Tensor]]]:
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                self.key = item.index.fqn
                tensor = cast(torch.Tensor, planner.resolve_data(item))
                yield item, _copy_to_cpu(tensor.detach())

    def _write_piece(self, stream: _ChecksummedStream, item: WriteItem, content: Content) -> None:
        stream.write(bytes(-stream.tell() % ALIGNMENT_BYTES))
        self._end_piece(stream)
        at, elements = stream.tell(), None
        start: Shape = ()
        shape: Shape = ()
        if isinstance(content, torch.Tensor):
            elements = write_tensor(stream, content)
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        else:
            stream.write(content.getbuffer())
        length = stream.tell() - at
        place = file_part(self.path.name, at, length)
        self.results.append(WriteResult(item.index, length, place))
        piece = Piece(self.path.name, at, length, 0, "", elements, start, shape)
        self._pieces.append((item.index.fqn, piece))

    def _end_piece(self, stream: _ChecksummedStream) -> None:
        """Record the span and checksum of the previous piece, with the zeros after it."""
        checksum = stream.checksum_so_far()
        if self._pieces:
            key, piece = self._pieces[-1]
            span = stream.tell() - piece.at
            self._pieces[-1] = (key, piece._replace(span=span, checksum=checksum))


class _ChecksummedStream:
    """A file that is written with a running checksum."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._running, self._end = stream, RunningChecksum(), 0

    def write(self, content: bytes | memoryview) -> int:
        """Write bytes and add them to the checksum."""
        self._running.update(content)
        self._end += len(content)
        return self._stream.write(content)

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._end

    def flush(self) -> None:
        """Do nothing. torch.save expects the method."""

    def checksum_so_far(self) -> str:
        """Return the checksum of the bytes since the last call."""
        running, self._running = self._running, RunningChecksum()
        return running.hexdigest()


class _IndexWriter(FileSystemWriter):
    """A writer of torch's index for a directory that will be renamed."""

    def __init__(self, directory: Path, final: Place) -> None:
        super().__init__(directory, sync_files=False)
        self._final = final

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(str(self._final), save_id=self.save_id, modules=[OUR_MARK])


def _copy_to_cpu(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the CPU. The returned function waits for the copy."""
    is_alone = True
    if not tensor.is_cpu:
        tensor = start_host_copy(tensor)
    else:
        # torch.save writes whole storages, so a view is copied to a storage of its size.
        is_alone = tensor.untyped_storage().nbytes() == prod(tensor.shape) * tensor.itemsize
    wait = host_copies_so_far()

    def finish() -> torch.Tensor:
        wait()  # an asynchronous save has started the copy earlier
        return tensor if is_alone else tensor.clone()

    return finish


def _name_failure(error: Exception, path: Place, key: str | None = None) -> CheckpointingException:
    """Turn an error into one of ours, since not every exception can be sent to the other ranks."""
    origin: BaseException | None = error
    # torch.save hides the operating system's error, such as a full disk, in the chain of causes.
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__cause__ or origin.__context__
    at = f" at key {key!r}" if key is not None else ""
    return CheckpointingException(
        f"{path} cannot be written{at} ({describe_error(origin or error)})"
    )
