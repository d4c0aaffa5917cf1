"""The plan of a save, which is refused if the shards do not make whole tensors."""

from __future__ import annotations

import io
import json
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from mcore.parallel.checkpoint.dtensor import with_leading_axes
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import ShardedObject, serialize
from mcore.parallel.checkpoint.planning.staging import (
    StagedValue,
    data_problem,
    digest_of,
    written_shards,
)
from mcore.parallel.checkpoint.planning.validation import (
    ShardRecord,
    decode_records,
    describe_entries,
    encode_records,
    raise_if_not_whole,
    validate_plans,
)
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import (
    Entries,
    Path,
    dotted,
    flatten_state_dict,
    named_paths,
)
from mcore.parallel.shortened import titled_list


@dataclass(frozen=True)
class _RankReport:
    """The packed data that the coordinator needs from a rank in addition to its write items."""

    written: bytes
    unwritten: bytes  # separate: equal on many ranks, and equal bytes are unpacked once
    common: bytes
    paths: bytes


class ShardedSavePlanner(SavePlanner):
    """Plans a save of :class:`ShardedTensor` and :class:`ShardedObject` values.

    Works with ``torch.distributed.checkpoint.save`` and any storage writer. Main replicas write
    tensors and objects. The coordinator writes all other leaves. It refuses plans in which an
    element is written twice or never, and warns about common leaves that differ.

    Args:
        entries: Leaves already sorted by kind, instead of the leaves of the state dict.
        weights_only: Refuse objects and values that a load would refuse, since unpickling them runs
            code.

    Example:
        >>> import tempfile
        >>> import torch.distributed.checkpoint as dcp
        >>> from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
        >>> shard = make_sharded_tensor_for_checkpoint(torch.arange(3.0), "w")
        >>> folder = tempfile.mkdtemp()
        >>> metadata = dcp.save(
        ...     {"w": shard}, checkpoint_id=folder, planner=ShardedSavePlanner(), no_dist=True
        ... )
        >>> metadata.state_dict_metadata["w"].size
        torch.Size([3])
    """

    def __init__(self, entries: Entries | None = None, *, weights_only: bool = True) -> None:
        self._prepared = entries
        self._weights_only = weights_only
        self._entries = entries or Entries([], [], {}, [])
        self._is_coordinator = False
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}
        self._values: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Accept the state dict of this rank."""
        self._entries = self._prepared or flatten_state_dict(state_dict)
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """List the writes of this rank.

        Raises:
            CheckpointingException: A shard that this rank must write has no data.
        """
        self._tensors, self._values = {}, {}
        items = self._plan_tensors() + self._plan_objects() + self._plan_common()
        return SavePlan(items, planner_data=self._report())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check the plans of all ranks against each other and describe the checkpoint.

        Raises:
            CheckpointingException: The shards do not make whole tensors.
        """
        reports = [plan.planner_data for plan in all_plans]
        records = _unpack_records(reports, each_rank=False)
        # Many ranks hold equal replicas, so the first check skips repeats. A failure repeats the
        # check with all of them, to name every rank.
        if validate_plans(records):
            raise_if_not_whole(_unpack_records(reports, each_rank=True))
        _warn_of_differences([report.common for report in reports])
        plain = [replace(plan, planner_data=None) for plan in all_plans]
        plans, metadata = create_default_global_save_plan(plain)
        # Nothing is stored for tensors without elements, but a load expects them in the index.
        for record in (record for rank_records in records for record in rank_records):
            if record.kind == "tensor" and not prod(record.global_shape):
                metadata.state_dict_metadata[record.key] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, record.dtype)),
                    size=torch.Size(record.global_shape),
                    chunks=[],
                )
        metadata.planner_data = _merge_paths([report.paths for report in reports])
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the coordinator's plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor, or the encoded object, of a write item."""
        if write_item.type != WriteItemType.BYTE_IO:
            tensor = self._tensors[write_item.index].resolve_conj().resolve_neg().contiguous()
            return tensor.as_subclass(torch.Tensor)
        value = self._values[write_item.index.fqn]
        if isinstance(value, StagedValue) and isinstance(value.content, bytes):
            return io.BytesIO(value.content)
        if isinstance(value, ShardedObject):
            return io.BytesIO(value.encode(weights_only=self._weights_only))
        return io.BytesIO(serialize(write_item.index.fqn, value, weights_only=self._weights_only))

    def _plan_tensors(self) -> list[WriteItem]:
        items = []
        for shard in written_shards(self._entries):
            if shard.data is None:
                raise CheckpointingException(f"{shard.key!r} {data_problem(None)}")
            index = MetadataIndex(shard.key, shard.global_offset)
            self._tensors[index] = with_leading_axes(shard.data, shard.prepend_axis_num)
            items.append(_make_write_item(index, WriteItemType.SHARD, self._tensors[index], shard))
        return items

    def _plan_objects(self) -> list[WriteItem]:
        items = []
        for _, obj in self._entries.objects:
            if is_main_replica(obj.replica_id):
                is_staged = isinstance(obj.data, StagedValue)
                self._values[obj.unique_key] = obj.data if is_staged else obj
                items.append(WriteItem(MetadataIndex(obj.unique_key), WriteItemType.BYTE_IO))
        return items

    def _plan_common(self) -> list[WriteItem]:
        items = []
        written = self._entries.written_common(is_first=self._is_coordinator)
        for name, value in written.items():
            content = value.content if isinstance(value, StagedValue) else value
            if isinstance(content, torch.Tensor):
                index = MetadataIndex(name, [0] * content.ndim)
                self._tensors[index] = content.detach()
                items.append(_make_write_item(index, WriteItemType.TENSOR, self._tensors[index]))
            else:
                self._values[name] = value
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        return items

    def _report(self) -> _RankReport:
        records = describe_entries(self._entries, is_first=self._is_coordinator)
        digests = {
            name: (value.digest if isinstance(value, StagedValue) else digest_of(value)).hex()
            for name, (_, value) in self._entries.common.items()
        }
        return _RankReport(
            written=encode_records([record for record in records if record.is_written]),
            unwritten=encode_records([record for record in records if not record.is_written]),
            common=_pack(digests),
            paths=_pack(list(named_paths(self._entries))),
        )


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _make_write_item(
    index: MetadataIndex,
    kind: WriteItemType,
    tensor: torch.Tensor,
    shard: ShardedTensor | None = None,
) -> WriteItem:
    offset = index.offset if index.offset is not None else torch.Size()
    return WriteItem(
        index=index,
        type=kind,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, tensor.size()),
            properties=TensorProperties(dtype=tensor.dtype),
            size=tensor.size() if shard is None else torch.Size(shard.global_shape),
        ),
    )


def _unpack_records(reports: Sequence[_RankReport], *, each_rank: bool) -> list[list[ShardRecord]]:
    """Unpack all records, but equal lists of unwritten replicas once unless ``each_rank``."""
    seen: set[bytes] = set()
    ranks = []
    for report in reports:
        records = decode_records(report.written)
        if each_rank or report.unwritten not in seen:
            seen.add(report.unwritten)
            records += decode_records(report.unwritten)
        ranks.append(records)
    return ranks


def _warn_of_differences(packed: Sequence[bytes]) -> None:
    if len(set(packed)) < 2:
        return
    first: dict[str, str] = json.loads(zlib.decompress(packed[0]))
    differing: set[str] = set()
    for other in dict.fromkeys(packed[1:]):
        digests: dict[str, str] = json.loads(zlib.decompress(other))
        for name, digest in digests.items():
            if first.setdefault(name, digest) != digest:
                differing.add(name)
    if differing:
        title = (
            "values outside ShardedTensor and ShardedObject differ between ranks. The value of the "
            "first rank that has the key is saved"
        )
        warnings.warn(titled_list(title, sorted(differing), "key"), stacklevel=2)


def _merge_paths(packed: Sequence[bytes]) -> dict[str, Path]:
    """Return the path of each key in a nested dict, for torch's converter.

    A key other than its dotted path, such as the key of stacked layers, is put at the top.
    """
    paths: dict[str, set[Path]] = {}
    for one in dict.fromkeys(packed):
        for name, path in json.loads(zlib.decompress(one)):
            paths.setdefault(name, set()).add(tuple(path))
    return {
        name: path if len(found) == 1 and dotted(path) == name else (name,)
        for name, found in paths.items()
        for path in found
    }
