"""The files of a save: one of each rank, then torch's index and the manifest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.index import OUR_MARK
from mcore.parallel.checkpoint.files.manifest import (
    ALIGNMENT_BYTES,
    MANIFEST_FILE,
    Piece,
    StoredKey,
    encode_manifest,
    pack_piece,
)
from mcore.parallel.checkpoint.files.pieces import RunningChecksum, checksum_of, write_tensor
from mcore.parallel.checkpoint.files.places import Place, size_problems
from mcore.parallel.checkpoint.files.reader import index_of, metadata_of
from mcore.parallel.checkpoint.files.save_place import LocalSave, RemoteSave
from mcore.parallel.checkpoint.host_copies import host_copies_so_far, start_host_copy
from mcore.parallel.checkpoint.planning.staging import Leaf, encode_value, key_of, tensor_of
from mcore.parallel.torch_compat import METADATA_FILE, file_part

Content = torch.Tensor | bytes


class RankFile:
    """The file that one rank writes in a save: values, then tensors, each as an archive.

    ``key`` is the key of the content that was requested or written last, None before the first.
    """

    def __init__(
        self, save: LocalSave | RemoteSave, rank: int, report: Callable[[int], object]
    ) -> None:
        self._report = report  # called with the numbers of written bytes
        self.path: Place = save.file_of(rank)
        self._open = partial(save.new_file, rank)
        self.key: str | None = None
        self._pieces = bytearray()
        self._unfinished: tuple[int, int, int] | None = None  # number, length, elements

    def write(self, leaves: Sequence[tuple[int, Leaf]], *, weights_only: bool) -> bytes:
        """Write and sync numbered leaves, and return the packed pieces. No leaves make no file."""
        if not leaves:
            return b""
        try:
            with self._open() as stream:
                checked = _ChecksummedStream(stream)
                for number, content in self._iterate_contents(leaves, weights_only):
                    self._write_piece(checked, number, content)
                self._end_piece(checked)
        except CheckpointingException:
            raise
        except Exception as error:
            raise _name_failure(error, self.path, self.key) from error
        return bytes(self._pieces)

    def _iterate_contents(
        self, leaves: Sequence[tuple[int, Leaf]], weights_only: bool
    ) -> Iterator[tuple[int, Content]]:
        """Yield values, then tensors. Each tensor is copied while the previous one is written."""
        for number, leaf in leaves:
            if tensor_of(leaf) is None:
                self.key = key_of(leaf)
                yield number, encode_value(leaf, weights_only=weights_only)
        copies = self._start_copies(leaves)
        ahead = next(copies, None)
        while ahead is not None:
            (number, key, finish), ahead = ahead, next(copies, None)
            self.key = key
            yield number, finish()

    def _start_copies(
        self, leaves: Sequence[tuple[int, Leaf]]
    ) -> Iterator[tuple[int, str, Callable[[], torch.Tensor]]]:
        for number, leaf in leaves:
            tensor = tensor_of(leaf)
            if tensor is not None:
                self.key = key_of(leaf)
                plain = tensor.resolve_conj().resolve_neg().contiguous()
                yield number, self.key, _copy_to_cpu(plain)

    def _write_piece(self, stream: _ChecksummedStream, number: int, content: Content) -> None:
        stream.write(bytes(-stream.tell() % ALIGNMENT_BYTES))
        self._end_piece(stream)
        at, elements = stream.tell(), -1
        if isinstance(content, torch.Tensor):
            elements = write_tensor(stream, content)
            self._report(content.nbytes)
        else:
            stream.write(content)
        self._unfinished = (number, stream.tell() - at, elements)

    def _end_piece(self, stream: _ChecksummedStream) -> None:
        """Record the previous piece, with the checksum of it and the zeros after it."""
        checksum = stream.checksum_so_far()
        if self._unfinished is not None:
            self._pieces += pack_piece(*self._unfinished, checksum)


def publish_checkpoint(
    save: LocalSave | RemoteSave,
    keys: Mapping[str, StoredKey],
    files: Mapping[str, Sequence[tuple[str, Piece]]],
    paths: Any,
) -> int:
    """Write index and manifest of files with pieces, and publish the checkpoint.

    One rank, after all have written. Returns the size of all files in bytes.
    """
    sizes = {name: pieces[-1][1].at + pieces[-1][1].length for name, pieces in files.items()}
    for _, problem in size_problems(save.folder, sizes):
        raise CheckpointingException(f"{problem} (all ranks must write to one shared file system)")
    metadata = metadata_of(keys)
    metadata.planner_data = paths
    metadata.storage_meta = StorageMeta(str(save.final), modules=[OUR_MARK])
    metadata.storage_data = {
        index_of(name, stored, piece): file_part(piece.file, piece.at, piece.length)
        for name, stored in keys.items()
        for piece in stored.pieces
    }
    path = save.folder / METADATA_FILE
    try:
        index = pickle.dumps(metadata)
        save.write_index(index)
        whole = {METADATA_FILE: (len(index), checksum_of(index))}
        path = save.folder / MANIFEST_FILE
        manifest = encode_manifest(keys, files, whole)
        save.write_manifest(manifest)
    except CheckpointingException:
        raise
    except Exception as error:
        raise _name_failure(error, path) from error
    sizes.update({METADATA_FILE: len(index), MANIFEST_FILE: len(manifest)})
    save.publish(sizes)
    return sum(sizes.values())


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
