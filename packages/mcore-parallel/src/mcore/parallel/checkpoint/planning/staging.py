"""Copies and digests of the values of a save, which later changes do not reach."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import xxhash

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.shortened import titled_list
from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu
from mcore.tensor.dtensor import to_local_if_dtensor


@dataclass(frozen=True)
class StagedValue:
    """A copy of a common value or object."""

    digest: bytes
    content: (
        bytes | torch.Tensor | None
    )  # pickled, or a tensor; None if this rank does not write it


def serialize(name: str, value: Any, *, weights_only: bool = True) -> bytes:
    """Pickle a value, staged or not, in the format of torch.save.

    With ``weights_only``, raise for a value that can be loaded only by running code.
    """
    if isinstance(value, StagedValue) and isinstance(value.content, bytes):
        return value.content
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise CheckpointingException(
            f"{name!r} of type {type(value).__name__} cannot be pickled "
            f"({type(error).__name__}: {error}). Save plain values, or wrap it in "
            "LocalNonpersistentObject"
        ) from error
    if weights_only and not _is_plain(value):
        stream.seek(0)
        try:
            # The meta device skips the bytes of tensors.
            torch.load(stream, map_location="meta", weights_only=True)
        except Exception as error:
            kind = next(_find_odd_types(value), type(value))
            raise CheckpointingException(
                f"{name!r} holds a {kind.__module__}.{kind.__qualname__}, which a load would "
                "refuse, since unpickling it runs code. Save plain values and tensors (an array as "
                "torch.from_numpy(array), a NumPy scalar as value.item(), a path as str(path), "
                "...), or pass weights_only=False to both the save and the load"
            ) from error
    return stream.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _find_odd_types(value: Any) -> Iterator[type]:
    """Yield the types inside a value that are neither plain nor containers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_odd_types(key)
            yield from _find_odd_types(item)
    elif type(value) in (list, tuple, set):
        for item in value:
            yield from _find_odd_types(item)
    elif not _is_plain(value) and type(value) is not torch.Tensor:
        yield type(value)


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
        objects=[
            (path, replace(obj, data=_stage_object(obj, weights_only)))
            for path, obj in entries.objects
        ],
        common={
            name: (path, _stage_common(name, value, name in written, weights_only))
            for name, (path, value) in entries.common.items()
        },
        local=[],
    )


def _stage_shard(shard: ShardedTensor) -> ShardedTensor:
    if shard.data is None or not is_main_replica(shard.replica_id):
        return shard.without_data()
    return replace(shard, data=to_local_if_dtensor(shard.data).detach().to("cpu", copy=True))


def _stage_object(obj: ShardedObject, weights_only: bool) -> StagedValue | None:
    if not is_main_replica(obj.replica_id):
        return None
    return StagedValue(b"", serialize(obj.unique_key, obj.data, weights_only=weights_only))


def _stage_common(name: str, value: Any, is_written: bool, weights_only: bool) -> StagedValue:
    digest = digest_of(value)
    if not is_written:
        return StagedValue(digest, None)
    if isinstance(value, torch.Tensor):
        return StagedValue(digest, value.detach().to("cpu", copy=True))
    return StagedValue(digest, serialize(name, value, weights_only=weights_only))


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that depend on type and content, not on dict order or hash seeds."""
    hasher = xxhash.xxh3_64(f"<{type(value).__name__}>".encode())
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if not value.is_meta:
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
