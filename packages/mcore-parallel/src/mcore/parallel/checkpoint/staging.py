"""Copies of what a save writes, so that later changes do not reach the file."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from mcore.parallel.checkpoint.common_digest import digest_of
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.shortened import titled_list
from mcore.tensor.dtensor import to_local_if_dtensor

__all__ = [
    "StagedValue",
    "data_problem",
    "reject_unsavable",
    "serialized",
    "stage_entries",
    "written_shards",
]


@dataclass(frozen=True)
class StagedValue:
    """A common value or object as it was when it was staged.

    Attributes:
        digest: Of the value, on every rank.
        content: Its pickled bytes or a copy of the tensor, on the rank that writes it.
    """

    digest: bytes
    content: bytes | torch.Tensor | None


def serialized(name: str, value: Any) -> bytes:
    """Pickle a value in the format of torch.save.

    Args:
        name: Its name in the checkpoint, for the error text.
        value: The value, or one that was staged.

    Raises:
        CheckpointingException: It cannot be pickled.
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
    return stream.getvalue()


def written_shards(entries: Entries) -> list[ShardedTensor]:
    """Return the shards that this rank writes: main replicas that have elements."""
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
    """Say why a tensor cannot be written, or None."""
    if data is None:
        return "has no data: its ShardedTensor is only a description"
    if data.is_meta:
        return "is on the meta device: materialise it first"
    if data.layout != torch.strided:
        return f"has layout {data.layout}: make it dense"
    return None


def stage_entries(entries: Entries, *, with_common: bool) -> Entries:
    """Copy what this rank writes to the CPU and drop the data of the rest.

    Args:
        entries: The leaves of the state dict.
        with_common: Whether this rank writes the common leaves.

    Returns:
        Leaves of the same names that share no memory with the given ones.
    """
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
