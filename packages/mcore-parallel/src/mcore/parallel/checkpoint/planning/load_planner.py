"""The plan of a load: what each rank reads, refused before anything is read if it does not fit."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore.parallel.checkpoint.dtensor import with_leading_axes
from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor
from mcore.parallel.checkpoint.state_tree import (
    Entries,
    Path,
    flatten_state_dict,
    rebuild_state_dict,
)
from mcore.parallel.shortened import titled_list
from mcore.tensor.dtensor import to_local_if_dtensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Memory of this rank that a shard of a global tensor is read into."""

    tensor: torch.Tensor  # detached, with prepended axes first
    global_shape: Shape  # on this side
    offset: Shape
    shape: Shape
    allow_shape_mismatch: bool

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return the shard in terms of torch.distributed.checkpoint."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.shape))


class ShardedLoadPlanner(LoadPlanner):
    """Plans a load into :class:`ShardedTensor` and :class:`ShardedObject` values.

    Works with ``torch.distributed.checkpoint.load`` and any storage reader, on checkpoints of
    this package and of torch.distributed.checkpoint itself. Tensors are filled in place, on every
    rank; :meth:`loaded_state_dict` gives them and all other values after the load.

    With ``torch.distributed.checkpoint.load`` use it only on checkpoints that you trust: the reader
    of torch unpickles the index, which may run any code, before a planner sees it, and checks no
    content. :func:`load_sharded_state_dict` does neither.

    Args:
        strict: Refuse a checkpoint that lacks a key; otherwise the local value stays.
        weights_only: Unpickle objects with torch's restricted unpickler. False runs whatever code
            the checkpoint holds.

    Example:
        >>> import tempfile
        >>> from mcore.parallel.checkpoint import (
        ...     make_sharded_tensor_for_checkpoint,
        ...     save_sharded_state_dict,
        ... )
        >>> import torch.distributed.checkpoint as dcp
        >>> folder = tempfile.mkdtemp() + "/step_1"
        >>> shard = make_sharded_tensor_for_checkpoint(torch.arange(3.0), "w")
        >>> save_sharded_state_dict({"w": shard}, folder)
        >>> target = make_sharded_tensor_for_checkpoint(torch.zeros(3), "w")
        >>> planner = ShardedLoadPlanner()
        >>> dcp.load({"w": target}, checkpoint_id=folder, planner=planner, no_dist=True)
        >>> planner.loaded_state_dict()["w"]
        tensor([0., 1., 2.])
    """

    def __init__(self, *, strict: bool = True, weights_only: bool = True) -> None:
        self._strict = strict
        self._weights_only = weights_only
        self._is_coordinator = False
        self.has_listed_objects = False  # Megatron-LM writes each object as a list of it alone
        self._state_dict: Mapping[str, Any] | None = None
        self._entries = Entries([], [], {}, [])
        self.wanted: frozenset[str] = frozenset()
        self._metadata = Metadata({})
        self._start_over()

    def _start_over(self) -> None:
        self._targets: dict[str, list[torch.Tensor]] = {}
        self._results: dict[Path, Any] = {}
        self._values: dict[str, Any] = {}
        self._zeroed: list[torch.Tensor] = []
        self._problems: list[str] = []
        self._casts: list[str] = []

    def take(self, state_dict: Mapping[str, Any]) -> frozenset[str]:
        """Take the state dict to fill, and return the keys that it asks for; no communication."""
        self._state_dict, self._entries = state_dict, flatten_state_dict(state_dict)
        tensors = {shard.key for _, shard in self._entries.tensors}
        objects = {obj.unique_key for _, obj in self._entries.objects}
        self.wanted = frozenset(tensors | objects | self._entries.common.keys())
        return self.wanted

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill and the index of the checkpoint."""
        if metadata is None:
            raise CheckpointingException("a load needs the index of the checkpoint, got None")
        if self._state_dict is not state_dict:
            self.take(state_dict)
        self._metadata = metadata
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """List what this rank reads, after checking that all of it fits.

        Raises:
            CheckpointingException: A key is missing, a dtype or shape differs, or the checkpoint
                does not hold all elements; at most 20 such problems are listed.
        """
        self._start_over()
        items = self._object_items() + self._common_items() + self._tensor_items()
        if self._problems:
            raise CheckpointingException(
                titled_list("the checkpoint does not fit the state dict", self._problems)
            )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Accept all plans: ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Accept the plan; from here on targets are written."""
        for tensor in self._zeroed:
            tensor.zero_()
        if self._casts and self._is_coordinator:
            logger.info(
                "%d tensors change their dtype on load, such as %s",
                len(self._casts),
                self._casts[0],
            )
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object or common value.

        Raises:
            CheckpointingException: It cannot be unpickled.
        """
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        except Exception as error:
            hint = "; pass weights_only=False if you trust the file" if self._weights_only else ""
            raise CheckpointingException(
                f"key {name!r} cannot be unpickled ({describe_error(error)}){hint}"
            ) from error
        if self.has_listed_objects and type(found) is list and len(found) == 1:
            [found] = found
        self._values[name] = found

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the slice of the target tensor that a read item fills."""
        place = read_item.dest_index.index
        tensor = self._targets[read_item.dest_index.fqn][0 if place is None else place]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: tensors are read into place."""

    def loaded_state_dict(self) -> dict[str, Any]:
        """Return the loaded tensors and values in the structure of the state dict.

        Call it after the load. No communication.

        Returns:
            A new dict; a tensor is the ``data`` it was loaded into.
        """
        values = dict(self._results)
        values.update(self._entries.local)
        named = [(path, obj.unique_key, obj.data) for path, obj in self._entries.objects]
        named += [(path, name, value) for name, (path, value) in self._entries.common.items()]
        for path, name, local in named:
            if path not in values:
                values[path] = self._values.get(name, local)
        return rebuild_state_dict(self._state_dict or {}, values)

    def _object_items(self) -> list[ReadItem]:
        names = dict.fromkeys(obj.unique_key for _, obj in self._entries.objects)
        return [item for name in names for item in self._bytes_items(name, "an object")]

    def _common_items(self) -> list[ReadItem]:
        items: list[ReadItem] = []
        for name, (path, local) in self._entries.common.items():
            saved = self._metadata.state_dict_metadata.get(name)
            if isinstance(saved, TensorStorageMetadata):
                items += self._common_tensor_items(name, path, local, saved)
            else:
                items += self._bytes_items(name, "a value")
        return items

    def _common_tensor_items(
        self, name: str, path: Path, local: Any, saved: TensorStorageMetadata
    ) -> list[ReadItem]:
        if not isinstance(local, torch.Tensor):
            value = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        elif local.is_meta:
            value = torch.empty_like(local, device="cpu", requires_grad=False)
        else:
            _require_fillable(name, local)
            value = local
        self._results[path] = value
        shape = tuple(value.shape)
        target = Target(value.detach(), shape, (0,) * len(shape), shape, False)
        return self._read_tensors(name, [target])

    def _tensor_items(self) -> list[ReadItem]:
        items: list[ReadItem] = []
        for key, group in groupby(self._entries.tensors, key=lambda entry: entry[1].key):
            targets = []
            for path, shard in group:
                self._results[path], target = _target_of(shard)
                if self._is_lacking(key, target):
                    self._results[path] = shard.data
                targets.append(target)
            items += self._read_tensors(key, targets)
        return items

    def _bytes_items(self, name: str, wanted: str) -> list[ReadItem]:
        saved = self._metadata.state_dict_metadata.get(name)
        if isinstance(saved, BytesStorageMetadata):
            nowhere = torch.Size([0])
            index = MetadataIndex(name)
            return [ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)]
        if saved is not None:
            self._problems.append(f"key {name!r}: the checkpoint has a tensor, not {wanted}")
        else:
            self._note_missing(name)
        return []

    def _read_tensors(self, key: str, targets: list[Target]) -> list[ReadItem]:
        saved = self._metadata.state_dict_metadata.get(key)
        if saved is None:
            if any(self._is_lacking(key, target) for target in targets):
                self._note_missing(key)
            return []
        problems = [problem for t in targets if (problem := _tensor_problem(key, saved, t))]
        if problems or not isinstance(saved, TensorStorageMetadata):
            self._problems += dict.fromkeys(problems)
            return []
        filled = [target for target in targets if target.tensor.numel()]
        if key in self._targets:
            self._problems.append(f"key {key!r} names a tensor and a plain value; rename one")
        self._targets[key] = [target.tensor for target in filled]
        items = create_read_items_for_chunk_list(key, saved, [t.chunk for t in filled])
        self._check_filling(key, saved, filled, items)
        return items

    def _is_lacking(self, key: str, target: Target) -> bool:
        """Return whether the checkpoint lacks a key; tensors without elements need none."""
        return key not in self._metadata.state_dict_metadata and prod(target.global_shape) > 0

    def _check_filling(
        self,
        key: str,
        saved: TensorStorageMetadata,
        targets: list[Target],
        items: list[ReadItem],
    ) -> None:
        """Record holes, casts, and what must be zeroed because the checkpoint has less of it."""
        found = [0] * len(targets)
        for item in items:
            found[item.dest_index.index or 0] += prod(item.lengths)
        for target, elements in zip(targets, found, strict=True):
            if tuple(saved.size) != target.global_shape:
                self._zeroed.append(target.tensor)
            elif elements != target.tensor.numel():
                self._problems.append(
                    f"key {key!r}: the checkpoint has {elements} of the {target.tensor.numel()} "
                    f"elements at offset {target.offset} shape {target.shape}; it was not saved "
                    "whole"
                )
        if targets and saved.properties.dtype != targets[0].tensor.dtype:
            self._casts.append(
                f"{key!r} from {saved.properties.dtype} to {targets[0].tensor.dtype}"
            )

    def _note_missing(self, name: str) -> None:
        if self._strict:
            self._problems.append(
                f"key {name!r} is missing in the checkpoint; pass strict=False to keep the local "
                "value"
            )


def _target_of(shard: ShardedTensor) -> tuple[torch.Tensor, Target]:
    """Return the tensor that a load returns, new where there is none, and the target in it."""
    data = shard.data
    if data is None:
        data = torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
    if data.is_meta:
        raise CheckpointingException(
            f"key {shard.key!r} is on the meta device: materialise it before the load, with "
            "module.to_empty(device=...) for instance"
        )
    _require_fillable(shard.key, to_local_if_dtensor(data))
    inside = Target(
        with_leading_axes(data, shard.prepend_axis_num),
        shard.global_shape,
        shard.global_offset,
        shard.shard_shape,
        shard.allow_shape_mismatch,
    )
    return data, inside


def _tensor_problem(
    key: str, saved: TensorStorageMetadata | BytesStorageMetadata, target: Target
) -> str | None:
    """Return why a tensor of the checkpoint cannot be read into a target, or None."""
    if not isinstance(saved, TensorStorageMetadata):
        return f"key {key!r}: the checkpoint has an object, not a tensor"
    found, wanted = saved.properties.dtype, target.tensor.dtype
    if found != wanted and not (found.is_floating_point and wanted.is_floating_point):
        return f"key {key!r}: the checkpoint has dtype {found}, expected {wanted}"
    shape = tuple(saved.size)
    if shape == target.global_shape:
        return None
    has_as_many_axes = len(shape) == len(target.global_shape)
    if not has_as_many_axes or not target.allow_shape_mismatch:
        hint = "; allow_shape_mismatch=True reads what overlaps and zeroes the rest"
        return (
            f"key {key!r}: the checkpoint has global shape {shape}, expected "
            f"{target.global_shape}{hint if has_as_many_axes else ''}"
        )
    return None


def _require_fillable(key: str, tensor: torch.Tensor) -> None:
    problem = _unfillable(tensor)
    if problem is not None:
        raise CheckpointingException(f"key {key!r}: the tensor to fill {problem}")


def _unfillable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be filled in place, or None."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is not plain memory (layout {tensor.layout}, dtype {tensor.dtype})"
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded, so that several elements share their memory; clone() it first"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "was made in inference mode and cannot change outside of it; load in inference mode, "
            "or make it with torch.no_grad()"
        )
    return None
