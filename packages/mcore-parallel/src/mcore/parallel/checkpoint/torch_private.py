"""The private torch names that sharded checkpoints need, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "METADATA_FILE",
    "METADATA_GLOBALS",
    "dtensor_chunk",
    "file_part",
    "split_factor",
]

METADATA_FILE = ".metadata"

_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
METADATA_GLOBALS = frozenset(
    {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES}
    | {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)
"""Module and name of everything a ``.metadata`` file may refer to, besides dtypes and paths."""


def dtensor_chunk(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of this rank's part of a DTensor, as torch's checkpoints see it."""
    [chunk] = cast("Any", tensor).__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a strided shard (FSDP2 over tensor parallelism), else None."""
    return cast("int | None", getattr(placement, "split_factor", None))


def file_part(name: str, offset: int, length: int) -> Any:
    """Return how an index says in which bytes of which file something is."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)
