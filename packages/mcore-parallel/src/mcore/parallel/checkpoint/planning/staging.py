"""Copies and digests of the values of a save, which later changes do not reach."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import xxhash

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.pieces import is_storable
from mcore.parallel.checkpoint.host_copies import start_host_copy
from mcore.parallel.checkpoint.objects import ShardedObject, serialize
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.shortened import titled_list
from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu
from mcore.tensor.dtensor import to_local_if_dtensor


@dataclass(frozen=True)
class StagedValue:
    """A copy of a common value or object."""

    digest: bytes
    content: bytes | torch.Tensor | None  # None if this rank does not write it


def written_shards(entries: Entries) -> list[ShardedTensor]:
    """Return the shards with elements that this rank writes."""
    return [
        shard
        for _, shard in entries.tensors
        if is_main_replica(shard.replica_id) and prod(shard.local_shape) > 0
    ]


def reject_unsavable(entries: Entries, *, is_first: bool) -> None:
    """Raise CheckpointingException for tensors that this rank must write but cannot."""
    tensors: list[tuple[str, torch.Tensor | None]] = [
        (shard.key, shard.data) for shard in written_shards(entries)
    ]
    tensors += [
        (name, value)
        for name, value in entries.written_common(is_first=is_first).items()
        if isinstance(value, torch.Tensor)
    ]
    problems = [f"{name!r} {text}" for name, data in tensors if (text := data_problem(data))]
    if problems:
        raise CheckpointingException(titled_list("some tensors cannot be saved", problems))


def data_problem(data: torch.Tensor | None) -> str | None:
    """Return why a tensor cannot be written, or None."""
    if data is None:
        return "has no data: its ShardedTensor is only a description"
    data = to_local_if_dtensor(data)
    if data.is_meta:
        return "is on the meta device: materialise it first"
    if data.layout != torch.strided:
        return f"has layout {data.layout}: make it dense"
    if data.is_quantized:
        return f"has dtype {data.dtype}, which needs code to be loaded: dequantize it"
    if not is_storable(data.dtype):
        return f"has dtype {data.dtype}, which torch.save does not know: save view(torch.uint8)"
    if type(data).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {type(data).__qualname__}, which is not plain memory: save its plain tensors "
            "instead"
        )
    return None


def stage_entries(entries: Entries, *, is_first: bool, weights_only: bool) -> Entries:
    """Copy the values that this rank writes to the CPU, and drop the data of all others."""
    written = entries.written_common(is_first=is_first)
    return replace(
        entries,
        tensors=[(path, _stage_shard(shard)) for path, shard in entries.tensors],
        objects=[(path, _stage_object(obj, weights_only)) for path, obj in entries.objects],
        common={
            name: (path, _stage_common(name, value, name in written, weights_only))
            for name, (path, value) in entries.common.items()
        },
        local=[],
    )


def _stage_shard(shard: ShardedTensor) -> ShardedTensor:
    if shard.data is None or not is_main_replica(shard.replica_id):
        return shard.without_data()
    return replace(shard, data=start_host_copy(to_local_if_dtensor(shard.data)))


def _stage_object(obj: ShardedObject, weights_only: bool) -> ShardedObject:
    if not is_main_replica(obj.replica_id):
        return obj.without_data()
    return replace(obj, data=StagedValue(b"", obj.encode(weights_only=weights_only)))


def _stage_common(name: str, value: Any, is_written: bool, weights_only: bool) -> StagedValue:
    digest = digest_of(value)
    if not is_written:
        return StagedValue(digest, None)
    if isinstance(value, torch.Tensor):
        return StagedValue(digest, start_host_copy(value))
    return StagedValue(digest, serialize(name, value, weights_only=weights_only))


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that depend on type and content, not on dict order or hash seeds."""
    hasher = xxhash.xxh3_64(f"<{type(value).__name__}>".encode())
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if hasattr(value, "__tensor_flatten__"):  # a subclass that consists of tensors
            for name in value.__tensor_flatten__()[0]:
                hasher.update(digest_of(getattr(value, name)))
        elif not value.is_meta:
            hasher.update(memory_of(row_major_on_cpu(value)))
    elif isinstance(value, Mapping):
        for entry in sorted(digest_of(key) + digest_of(item) for key, item in value.items()):
            hasher.update(entry)
    elif isinstance(value, list | tuple):
        for item in value:
            hasher.update(digest_of(item))
    elif isinstance(value, set | frozenset):
        for entry in sorted(map(digest_of, value)):
            hasher.update(entry)
    elif isinstance(value, bytes | bytearray):
        hasher.update(bytes(value))
    elif value is None or isinstance(value, bool | int | float | complex | str):
        hasher.update(repr(value).encode())
    else:
        hasher.update(pickle.dumps(value))
    return hasher.digest()
