"""The files of a save: one of each rank, then torch's index and the manifest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files import manifest
from mcore.parallel.checkpoint.files.directory import LocalSave, RemoteSave
from mcore.parallel.checkpoint.files.index import OUR_MARK
from mcore.parallel.checkpoint.files.pieces import ChecksummedStream, checksum_of, write_tensor
from mcore.parallel.checkpoint.files.places import Place, size_problems
from mcore.parallel.checkpoint.planning.staging import Leaf, key_of, put_values_first, start_content
from mcore.parallel.torch_compat import METADATA_FILE, file_part


def metadata_of(keys: Mapping[str, manifest.StoredKey]) -> dcp.Metadata:
    """Describe some keys as torch.distributed.checkpoint does, without their locations."""
    described: dict[str, Any] = {}
    # Shared by the keys, which keeps the pickled index small.
    size_of, properties_of = (
        cache(torch.Size),
        cache(lambda dtype: dcp.TensorProperties(dtype=dtype)),
    )
    for name, stored in keys.items():
        if stored.dtype is None:
            described[name] = dcp.BytesStorageMetadata()
            continue
        chunks = [
            dcp.ChunkStorageMetadata(size_of(piece.start), size_of(piece.shape))
            for piece in stored.pieces
        ]
        described[name] = dcp.TensorStorageMetadata(
            properties_of(stored.dtype), size_of(stored.shape), chunks
        )
    return dcp.Metadata(described)


def index_of(name: str, stored: manifest.StoredKey, piece: manifest.Piece) -> dcp.MetadataIndex:
    """Return the index of a piece in a plan."""
    return dcp.MetadataIndex(name, None if stored.dtype is None else piece.start)


def write_rank_file(
    save: LocalSave | RemoteSave,
    rank: int,
    leaves: Sequence[tuple[int, Leaf]],
    report: Callable[[int], object],
    *,
    weights_only: bool,
) -> bytes:
    """Write and sync the file of a rank: numbered values, then tensors, each as an archive.

    Returns the packed pieces. No leaves make no file. ``report`` gets the bytes of each tensor.
    """
    if not leaves:
        return b""
    key: str | None = None  # of the content that was requested or written last
    pieces: list[tuple[int, int, int, str]] = []

    def start_contents() -> Iterator[tuple[int, str, Callable[[], torch.Tensor | bytes]]]:
        nonlocal key
        for number, leaf in put_values_first(leaves):
            key = key_of(leaf)
            yield number, key, start_content(leaf, weights_only=weights_only)

    try:
        with save.new_file(rank) as file:
            stream, contents = ChecksummedStream(file), start_contents()
            ahead = next(contents, None)
            while ahead is not None:  # each is copied while the previous one is written
                (number, key, finish), ahead = ahead, next(contents, None)
                content, at, elements = finish(), stream.end, -1
                if isinstance(content, torch.Tensor):
                    elements = write_tensor(stream, content)
                    report(content.nbytes)
                else:
                    stream.write(content)
                length = stream.end - at
                if ahead is not None:
                    stream.write(bytes(-stream.end % manifest.ALIGNMENT_BYTES))
                pieces.append((number, length, elements, stream.take_checksum()))
    except CheckpointingException:
        raise
    except Exception as error:
        raise _name_failure(error, save.file_of(rank), key) from error
    return manifest.pack_pieces(pieces)


def publish_checkpoint(
    save: LocalSave | RemoteSave,
    keys: Mapping[str, manifest.StoredKey],
    files: Mapping[str, Sequence[tuple[str, manifest.Piece]]],
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
    metadata.storage_meta = dcp.StorageMeta(str(save.final), modules=[OUR_MARK])
    metadata.storage_data = {
        index_of(name, stored, piece): file_part(piece.file, piece.at, piece.length)
        for name, stored in keys.items()
        for piece in stored.pieces
    }
    path = save.folder / METADATA_FILE
    try:
        index = pickle.dumps(metadata)
        save.write(METADATA_FILE, index)
        whole = {METADATA_FILE: (len(index), checksum_of(index))}
        path = save.folder / manifest.MANIFEST_FILE
        content = manifest.encode_manifest(keys, files, whole)
        save.write(manifest.MANIFEST_FILE, content)
    except CheckpointingException:
        raise
    except Exception as error:
        raise _name_failure(error, path) from error
    sizes.update({METADATA_FILE: len(index), manifest.MANIFEST_FILE: len(content)})
    save.publish(sizes)
    return sum(sizes.values())


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
