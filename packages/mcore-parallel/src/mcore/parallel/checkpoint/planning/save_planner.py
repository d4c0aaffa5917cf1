"""A planner for saves through torch.distributed.checkpoint."""

from __future__ import annotations

import io
from dataclasses import replace
from math import prod

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import describe_for_torch
from mcore.parallel.checkpoint.planning import staging
from mcore.parallel.checkpoint.planning.description import describe_leaves, encode_records
from mcore.parallel.checkpoint.planning.writers import GlobalPlan
from mcore.parallel.checkpoint.sharded import ShardedTensor
from mcore.parallel.checkpoint.state_tree import Entries, flatten_state_dict

_SEVERAL = 2  # a planner does not know the number of ranks


class ShardedSavePlanner(planner.SavePlanner):
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
        self._sources: dict[dcp.MetadataIndex, staging.Source] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: dcp.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Accept the state dict of this rank."""
        self._entries = self._prepared or flatten_state_dict(state_dict)
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> planner.SavePlan:
        """List the writes of this rank.

        Raises:
            CheckpointingException: A shard that this rank must write has no data.
        """
        self._sources = {}
        items, leaves = [], staging.list_candidates(self._entries)
        for leaf in leaves:
            if isinstance(leaf, staging.CommonValue) and not self._is_coordinator:
                continue
            if isinstance(leaf, ShardedTensor) and not prod(leaf.local_shape):
                continue
            if isinstance(leaf, ShardedTensor) and leaf.data is None:
                raise CheckpointingException(f"{leaf.key!r} {staging.data_problem(None)}")
            [content] = staging.take_contents(
                {0: leaf}, is_copied=False, weights_only=self._weights_only
            )
            items.append(_plan_write(leaf, content))
            self._sources[items[-1].index] = content.source
        described = describe_leaves(
            self._entries, leaves, _SEVERAL, {}, weights_only=self._weights_only
        )._replace(bare=[])
        if not self._is_coordinator:
            described = described._replace(common=encode_records([]))
        return planner.SavePlan(items, planner_data=described)

    def create_global_plan(
        self, all_plans: list[planner.SavePlan]
    ) -> tuple[list[planner.SavePlan], dcp.Metadata]:
        """Check the plans of all ranks against each other and describe the checkpoint.

        Raises:
            CheckpointingException: The shards do not make whole tensors.
        """
        plan = GlobalPlan([one.planner_data for one in all_plans])
        plan.require_whole()
        located = []
        for rank in range(len(all_plans)):
            writes = [one for one in plan.iterate_writes(rank) if prod(one.record.shard_shape)]
            located.append(("", [(one.number, 0, 0, b"") for one in writes]))
        metadata, _ = describe_for_torch(plan.name_pieces(located)[0])
        metadata.planner_data = plan.merge_paths()
        return [replace(one, planner_data=None) for one in all_plans], metadata

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        """Accept the coordinator's plan."""
        return new_plan

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor, or the encoded object, of a write item."""
        source = self._sources[write_item.index]
        if not isinstance(source, torch.Tensor):
            return io.BytesIO(source())
        return source.resolve_conj().resolve_neg().contiguous()


def _plan_write(leaf: staging.Candidate, content: staging.Content) -> planner.WriteItem:
    tensor = content.source
    if not isinstance(tensor, torch.Tensor):
        return planner.WriteItem(dcp.MetadataIndex(content.key), planner.WriteItemType.BYTE_IO)
    offset, shape, kind = (0,) * tensor.ndim, tuple(tensor.shape), planner.WriteItemType.TENSOR
    if isinstance(leaf, ShardedTensor):
        offset, shape, kind = leaf.global_offset, leaf.global_shape, planner.WriteItemType.SHARD
    return planner.WriteItem(
        index=dcp.MetadataIndex(leaf.key, offset),
        type=kind,
        tensor_data=planner.TensorWriteData(
            chunk=dcp.ChunkStorageMetadata(torch.Size(offset), tensor.size()),
            properties=dcp.TensorProperties(dtype=tensor.dtype),
            size=torch.Size(shape),
        ),
    )
