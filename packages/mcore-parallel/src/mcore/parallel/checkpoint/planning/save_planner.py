"""A planner for saves through torch.distributed.checkpoint."""

from __future__ import annotations

import io
from dataclasses import replace
from math import prod

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import Piece
from mcore.parallel.checkpoint.files.reader import metadata_of
from mcore.parallel.checkpoint.planning.staging import (
    Candidate,
    CommonValue,
    data_problem,
    encode_value,
    key_of,
    list_candidates,
    tensor_of,
)
from mcore.parallel.checkpoint.planning.validation import encode_records
from mcore.parallel.checkpoint.planning.writers import (
    GlobalPlan,
    describe_leaves,
    warn_of_differing,
)
from mcore.parallel.checkpoint.sharded import ShardedTensor
from mcore.parallel.checkpoint.state_tree import Entries, flatten_state_dict

_SEVERAL = 2  # a planner does not know the number of ranks


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
        self._leaves: dict[MetadataIndex, Candidate] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, object],
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
        self._leaves = {}
        items = []
        for leaf in list_candidates(self._entries):
            if isinstance(leaf, CommonValue) and not self._is_coordinator:
                continue
            if isinstance(leaf, ShardedTensor) and not prod(leaf.local_shape):
                continue
            items.append(self._plan_write(leaf))
            self._leaves[items[-1].index] = leaf
        described = describe_leaves(
            self._entries, _SEVERAL, {}, weights_only=self._weights_only
        )._replace(bare=[])
        if not self._is_coordinator:
            described = described._replace(common=encode_records([]))
        return SavePlan(items, planner_data=described)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check the plans of all ranks against each other and describe the checkpoint.

        Raises:
            CheckpointingException: The shards do not make whole tensors.
        """
        plan = GlobalPlan([one.planner_data for one in all_plans])
        plan.require_whole()
        warn_of_differing(plan.differing)
        nowhere = Piece("", 0, 0, 0, "", None, (), ())
        pieces: list[tuple[str, Piece]] = []
        for rank in range(len(all_plans)):
            writes = plan.iterate_writes(rank)
            filled = (one for one in writes if prod(one.record.shard_shape))
            pieces += plan.name_pieces(rank, ((one.number, nowhere) for one in filled))
        metadata = metadata_of(plan.list_keys(pieces))
        metadata.planner_data = plan.merge_paths()
        return [replace(one, planner_data=None) for one in all_plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the coordinator's plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor, or the encoded object, of a write item."""
        leaf = self._leaves[write_item.index]
        tensor = tensor_of(leaf)
        if tensor is None:
            return io.BytesIO(encode_value(leaf, weights_only=self._weights_only))
        return tensor.resolve_conj().resolve_neg().contiguous()

    def _plan_write(self, leaf: Candidate) -> WriteItem:
        tensor = tensor_of(leaf)
        if tensor is None:
            if isinstance(leaf, ShardedTensor):
                raise CheckpointingException(f"{leaf.key!r} {data_problem(None)}")
            return WriteItem(MetadataIndex(key_of(leaf)), WriteItemType.BYTE_IO)
        is_shard = isinstance(leaf, ShardedTensor)
        offset = leaf.global_offset if isinstance(leaf, ShardedTensor) else (0,) * tensor.ndim
        shape = leaf.global_shape if isinstance(leaf, ShardedTensor) else tensor.shape
        return WriteItem(
            index=MetadataIndex(leaf.key, offset),
            type=WriteItemType.SHARD if is_shard else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offset), tensor.size()),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(shape),
            ),
        )
