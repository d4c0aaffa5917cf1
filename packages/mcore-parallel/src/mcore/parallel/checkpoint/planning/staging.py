"""The leaves that a rank may write in a save, their copies on the CPU, and their digests."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.pieces import is_storable
from mcore.parallel.checkpoint.host_copies import start_host_copy
from mcore.parallel.checkpoint.objects import ShardedObject, serialize
from mcore.parallel.checkpoint.ranks import with_leading_axes
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.shortened import titled_list
from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu
from mcore.tensor.dtensor import to_local_if_dtensor

DIGEST_BYTES = 8


class CommonValue(NamedTuple):
    """A leaf that one rank writes for all that have it."""

    key: str
    value: Any


class EncodedValue(NamedTuple):
    """A leaf that is no tensor, as the bytes that are stored."""

    key: str
    content: bytes


Candidate = ShardedTensor | ShardedObject | CommonValue
Leaf = Candidate | EncodedValue


def list_candidates(entries: Entries) -> list[Candidate]:
    """List the leaves that a rank may write: shards, objects, then common leaves."""
    shards = [one for _, one in entries.tensors if is_main_replica(one.replica_id)]
    objects = [one for _, one in entries.objects if is_main_replica(one.replica_id)]
    common = [CommonValue(name, value) for name, (_, value) in entries.common.items()]
    return [*shards, *objects, *(one for one in common if one.key not in entries.merged)]


def key_of(leaf: Leaf) -> str:
    """Return the key under which a leaf is stored."""
    return leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key


def tensor_of(leaf: Leaf) -> torch.Tensor | None:
    """Return the plain local tensor of a leaf, None for other values."""
    if isinstance(leaf, ShardedTensor) and leaf.data is not None:
        return with_leading_axes(leaf.data, leaf.prepend_axis_num).as_subclass(torch.Tensor)
    value = leaf.value if isinstance(leaf, CommonValue) else None
    return value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else None


def count_bytes(leaves: Iterable[tuple[int, Leaf]]) -> int:
    """Return the size of the tensors among numbered leaves."""
    tensors = (tensor_of(leaf) for _, leaf in leaves)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def encode_value(leaf: Leaf, *, weights_only: bool) -> bytes:
    """Return the stored bytes of a leaf that is no tensor."""
    if isinstance(leaf, ShardedObject):
        return leaf.encode(weights_only=weights_only)
    if isinstance(leaf, EncodedValue):
        return leaf.content
    return serialize(leaf.key, leaf.value, weights_only=weights_only)  # type: ignore[union-attr]


def reject_unsavable(leaves: Iterable[Candidate]) -> None:
    """Raise CheckpointingException for tensors that cannot be written."""
    tensors: list[tuple[str, torch.Tensor | None]] = []
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor) and prod(leaf.local_shape) > 0:
            tensors.append((leaf.key, leaf.data))
        elif isinstance(leaf, CommonValue) and isinstance(leaf.value, torch.Tensor):
            tensors.append((leaf.key, leaf.value))
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


def stage_leaf(leaf: Candidate, *, weights_only: bool) -> Leaf:
    """Copy a leaf that this rank writes, or start to copy it, to the CPU."""
    if isinstance(leaf, ShardedTensor) and leaf.data is not None:
        return replace(leaf, data=start_host_copy(to_local_if_dtensor(leaf.data)))
    if isinstance(leaf, CommonValue) and isinstance(leaf.value, torch.Tensor):
        return CommonValue(leaf.key, start_host_copy(leaf.value))
    return EncodedValue(key_of(leaf), encode_value(leaf, weights_only=weights_only))


def digest_shard(shard: ShardedTensor) -> bytes:
    """Return the digest of the local tensor of a shard."""
    return digest_of(tensor_of(shard))


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
