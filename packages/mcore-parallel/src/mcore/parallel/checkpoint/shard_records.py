"""What a rank tells the others about its part of a save: plain numbers, small on the wire."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.sharded import Shape, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries, flatten_state_dict

__all__ = ["ShardRecord", "decode_records", "describe_entries", "describe_shards", "encode_records"]


class ShardRecord(NamedTuple):
    """One entry of a rank's state dict.

    Attributes:
        kind: ``"tensor"``, ``"object"`` or ``"common"``.
        key: Name; the dotted path for ``"common"``.
        is_main: Whether this rank writes it.
        dtype: Name of the dtype, empty for objects.
        global_shape: Shape of the tensor (prepended axes first) or array of objects.
        global_offset: Where the part starts; empty for parts that are not written.
        box_shape: Shape of the part, prepended axes first; empty for parts that are not written.
        prepend_axis_num: Number of prepended axes.
    """

    kind: str
    key: str
    is_main: bool
    dtype: str = ""
    global_shape: Shape = ()
    global_offset: Shape = ()
    box_shape: Shape = ()
    prepend_axis_num: int = 0


def describe_entries(entries: Entries, *, with_common: bool) -> list[ShardRecord]:
    """List what a rank writes, and once per key what it holds copies of.

    Args:
        entries: The rank's leaves.
        with_common: Whether this rank writes the common leaves.

    Returns:
        The records in a fixed order. Copies of several parts of a key are one record.
    """
    records: dict[ShardRecord, None] = {}
    written: list[ShardRecord] = []
    for _, shard in entries.tensors:
        record = ShardRecord(
            "tensor",
            shard.key,
            False,
            str(shard.dtype).removeprefix("torch."),
            shard.global_shape,
            prepend_axis_num=shard.prepend_axis_num,
        )
        if is_main_replica(shard.replica_id):
            written.append(
                record._replace(
                    is_main=True, global_offset=shard.global_offset, box_shape=shard.box_shape
                )
            )
        else:
            records[record] = None
    for _, obj in entries.objects:
        record = ShardRecord("object", obj.key, False, global_shape=obj.global_shape)
        if is_main_replica(obj.replica_id):
            written.append(record._replace(is_main=True, global_offset=obj.global_offset))
        else:
            records[record] = None
    if with_common:
        written += [ShardRecord("common", name, True) for name in entries.common]
    return written + list(records)


def describe_shards(
    state_dict: Mapping[str, Any], *, is_first_rank: bool = False
) -> list[ShardRecord]:
    """List what a rank with this state dict writes and holds copies of.

    No communication. The lists of all ranks are the input of :func:`validate_plans`.

    Args:
        state_dict: The rank's sharded state dict; meta tensors are fine.
        is_first_rank: Whether the rank writes the leaves that all ranks have alike.

    Returns:
        The records in a fixed order.

    Raises:
        CheckpointingException: It is no state dict.

    Example:
        >>> import torch
        >>> from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
        >>> shard = make_sharded_tensor_for_checkpoint(torch.zeros(3), "w")
        >>> [record.box_shape for record in describe_shards({"w": shard})]
        [(3,)]
    """
    return describe_entries(flatten_state_dict(state_dict), with_common=is_first_rank)


def encode_records(records: Sequence[ShardRecord]) -> bytes:
    """Pack records; equal records give equal bytes."""
    return zlib.compress(json.dumps(records, separators=(",", ":")).encode(), 1)


def decode_records(packed: bytes) -> list[ShardRecord]:
    """Unpack what :func:`encode_records` packed."""
    return [
        ShardRecord(kind, key, main, dtype, tuple(shape), tuple(offset), tuple(box), prepended)
        for kind, key, main, dtype, shape, offset, box, prepended in json.loads(
            zlib.decompress(packed)
        )
    ]
