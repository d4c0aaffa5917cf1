"""Copies and digests of what a save writes, so that later changes do not reach the file."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.shortened import titled_list
from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu
from mcore.tensor.dtensor import to_local_if_dtensor

Update = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class StagedValue:
    """A common value or object as it was when it was staged."""

    digest: bytes
    content: bytes | torch.Tensor | None  # pickled, or a copy of the tensor; None is not written


def serialized(name: str, value: Any) -> bytes:
    """Pickle a value, or one that was staged, in the format of torch.save."""
    if isinstance(value, StagedValue) and isinstance(value.content, bytes):
        return value.content
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise CheckpointingException(
            f"{name!r} of type {type(value).__name__} cannot be pickled "
            f"({type(error).__name__}: {error}); save plain values, or wrap it in "
            "LocalNonpersistentObject"
        ) from error
    return stream.getvalue()


def written_shards(entries: Entries) -> list[ShardedTensor]:
    """Return the shards with elements that this rank writes."""
    return [
        shard
        for _, shard in entries.tensors
        if is_main_replica(shard.replica_id) and prod(shard.local_shape) > 0
    ]


def reject_unsavable(entries: Entries, *, with_common: bool) -> None:
    """Raise CheckpointingException for tensors that this rank must write and cannot."""
    tensors: list[tuple[str, torch.Tensor | None]] = [
        (shard.key, shard.data) for shard in written_shards(entries)
    ]
    if with_common:
        tensors += [
            (name, value)
            for name, (_, value) in entries.common.items()
            if isinstance(value, torch.Tensor)
        ]
    problems = [f"{name!r} {text}" for name, data in tensors if (text := data_problem(data))]
    if problems:
        raise CheckpointingException(titled_list("some tensors cannot be saved", problems))


def data_problem(data: torch.Tensor | None) -> str | None:
    """Return why a tensor cannot be written, or None."""
    if data is None:
        return "has no data: its ShardedTensor is only a description"
    if data.is_meta:
        return "is on the meta device: materialise it first"
    if data.layout != torch.strided:
        return f"has layout {data.layout}: make it dense"
    return None


def stage_entries(entries: Entries, *, with_common: bool) -> Entries:
    """Copy what this rank writes to the CPU, sharing no memory, and drop the data of the rest."""
    return Entries(
        tensors=[(path, _staged_shard(shard)) for path, shard in entries.tensors],
        objects=[
            (path, replace(obj, data=_staged(obj.unique_key, obj.data, obj.replica_id)))
            for path, obj in entries.objects
        ],
        common={
            name: (path, _staged_common(name, value, with_common))
            for name, (path, value) in entries.common.items()
        },
        local=[],
    )


def _staged_shard(shard: ShardedTensor) -> ShardedTensor:
    if shard.data is None or not is_main_replica(shard.replica_id):
        return shard.without_data()
    return replace(shard, data=to_local_if_dtensor(shard.data).detach().to("cpu", copy=True))


def _staged(name: str, value: Any, replica_id: Any) -> StagedValue | None:
    return StagedValue(b"", serialized(name, value)) if is_main_replica(replica_id) else None


def _staged_common(name: str, value: Any, with_content: bool) -> StagedValue:
    digest = digest_of(value)
    if not with_content:
        return StagedValue(digest, None)
    if isinstance(value, torch.Tensor):
        return StagedValue(digest, value.detach().to("cpu", copy=True))
    return StagedValue(digest, serialized(name, value))


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that depend on type and content, not on dict order or hash seeds."""
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher.update, value)
    return hasher.digest()


def _feed(update: Update, value: Any) -> None:
    update(f"<{type(value).__name__}>".encode())
    if isinstance(value, torch.Tensor):
        _feed_tensor(update, value)
    elif isinstance(value, Mapping):
        for entry in sorted(digest_of(key) + digest_of(item) for key, item in value.items()):
            update(entry)
    elif isinstance(value, list | tuple):
        for item in value:
            update(digest_of(item))
    elif isinstance(value, set | frozenset):
        for entry in sorted(map(digest_of, value)):
            update(entry)
    elif isinstance(value, bytes | bytearray):
        update(bytes(value))
    elif value is None or isinstance(value, bool | int | float | complex | str):
        update(repr(value).encode())
    else:
        update(pickle.dumps(value))


def _feed_tensor(update: Update, tensor: torch.Tensor) -> None:
    update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if not tensor.is_meta:
        update(memory_of(row_major_on_cpu(tensor)))
