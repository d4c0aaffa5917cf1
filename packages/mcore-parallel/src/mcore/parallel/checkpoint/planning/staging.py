"""Copies and digests of what a save writes, so that later changes do not reach the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
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

Update = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class StagedValue:
    """A common value or object as it was when it was staged."""

    digest: bytes
    content: bytes | torch.Tensor | None  # pickled, or a copy of the tensor; None is not written


def serialized(name: str, value: Any, *, weights_only: bool = True) -> bytes:
    """Pickle a value, or one that was staged, in the format of torch.save.

    With ``weights_only``, one that could not be loaded without running its code is refused.
    """
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
    if weights_only and not _is_plain(value):
        _reject_code(name, value, stream)
    return stream.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _reject_code(name: str, value: Any, stream: io.BytesIO) -> None:
    """Raise where a load would refuse a pickle, which is found out without its tensors' bytes."""
    stream.seek(0)
    try:
        torch.load(stream, map_location="meta", weights_only=True)
    except Exception as error:
        kind = next(_odd_types(value), type(value))
        raise CheckpointingException(
            f"{name!r} holds a {kind.__module__}.{kind.__qualname__}, which a load would refuse, "
            "since code that the file names would have to be run; save plain values and tensors "
            "(an array as torch.from_numpy(array), a NumPy scalar as value.item(), a path as "
            "str(path), ...), or pass weights_only=False to both the save and the load"
        ) from error


def _odd_types(value: Any) -> Iterator[type]:
    """Yield the types inside a value that neither are plain nor hold others."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _odd_types(key)
            yield from _odd_types(item)
    elif type(value) in (list, tuple, set):
        for item in value:
            yield from _odd_types(item)
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
    """Raise CheckpointingException for tensors that this rank must write and cannot."""
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
        return f"has dtype {data.dtype}, which only the code in its file reads: dequantize it"
    if type(data).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {type(data).__qualname__}, which is not plain memory: save the plain tensors "
            "that it consists of"
        )
    return None


def stage_entries(entries: Entries, *, is_first: bool, weights_only: bool) -> Entries:
    """Copy what this rank writes to the CPU, sharing no memory, and drop the data of the rest."""
    written = entries.written_common(is_first=is_first)
    return replace(
        entries,
        tensors=[(path, _staged_shard(shard)) for path, shard in entries.tensors],
        objects=[
            (path, replace(obj, data=_staged(obj, weights_only))) for path, obj in entries.objects
        ],
        common={
            name: (path, _staged_common(name, value, name in written, weights_only))
            for name, (path, value) in entries.common.items()
        },
        local=[],
    )


def _staged_shard(shard: ShardedTensor) -> ShardedTensor:
    if shard.data is None or not is_main_replica(shard.replica_id):
        return shard.without_data()
    return replace(shard, data=to_local_if_dtensor(shard.data).detach().to("cpu", copy=True))


def _staged(obj: ShardedObject, weights_only: bool) -> StagedValue | None:
    if not is_main_replica(obj.replica_id):
        return None
    return StagedValue(b"", serialized(obj.unique_key, obj.data, weights_only=weights_only))


def _staged_common(name: str, value: Any, is_written: bool, weights_only: bool) -> StagedValue:
    digest = digest_of(value)
    if not is_written:
        return StagedValue(digest, None)
    if isinstance(value, torch.Tensor):
        return StagedValue(digest, value.detach().to("cpu", copy=True))
    return StagedValue(digest, serialized(name, value, weights_only=weights_only))


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that depend on type and content, not on dict order or hash seeds."""
    hasher = xxhash.xxh3_64()
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
