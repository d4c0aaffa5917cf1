"""The plan of a load, which is refused before any read if the checkpoint does not fit."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore.parallel.checkpoint import state_tree
from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.manifest import Box
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.planning.staging import list_local
from mcore.parallel.checkpoint.planning.validation import have_shared_elements
from mcore.parallel.checkpoint.selection import Selection
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor
from mcore.parallel.shortened import titled_list

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A tensor of this rank that a shard of a global tensor is read into."""

    tensor: torch.Tensor  # detached, with prepended axes first
    global_shape: Shape  # in the state dict
    offset: Shape
    shape: Shape
    allow_shape_mismatch: bool


class ShardedLoadPlanner(LoadPlanner):
    """Plans a load into :class:`ShardedTensor` and :class:`ShardedObject` values.

    Works with ``torch.distributed.checkpoint.load`` and any storage reader, on checkpoints of
    this package and of torch.distributed.checkpoint. Tensors are filled in place, on every rank.
    After the load, :meth:`loaded_state_dict` returns them and all other values.

    With ``torch.distributed.checkpoint.load`` use it only on checkpoints that you trust. torch's
    reader unpickles the index, which may run any code, before it calls a planner, and checks no
    content. :func:`load_sharded_state_dict` runs no code and checks the content.

    Args:
        strict: Refuse a checkpoint that lacks a key. Otherwise the local value stays.
        weights_only: Unpickle objects with torch's restricted unpickler. False runs any code in the
            checkpoint.

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
        self.has_listed_objects = False  # Megatron-LM wraps each object in a list
        self._state_dict: Mapping[str, Any] | None = None
        self._entries = state_tree.Entries([], [], {}, [])
        self._kinds: dict[str, type[ShardedObject]] = {}
        self.wanted: frozenset[str] = frozenset()
        self.boxes: dict[str, list[Box]] = {}  # of the tensors to fill, by key
        self._metadata = dcp.Metadata({})
        self._start_over()

    def _start_over(self) -> None:
        self._targets: dict[str, list[torch.Tensor]] = {}
        self._results: dict[state_tree.Path, Any] = {}
        self._values: dict[str, Any] = {}
        self._zeroed: list[torch.Tensor] = []
        self._problems: list[str] = []
        self._casts: list[str] = []

    def take(
        self,
        state_dict: Mapping[str, Any],
        selection: Selection | None = None,
        keys: Collection[str] = (),
    ) -> frozenset[str]:
        """Accept the state dict to fill, or a part, and return its keys. No communication."""
        self._state_dict, self._entries = state_dict, state_tree.flatten_state_dict(state_dict)
        if selection is not None:
            self._entries = selection.choose(self._entries, keys)
        self.boxes = {}
        for _, shard in self._entries.tensors:
            self.boxes.setdefault(shard.key, []).append((shard.global_offset, shard.shard_shape))
        self._kinds = {obj.unique_key: type(obj) for _, obj in self._entries.objects}
        self.wanted = frozenset(
            self.boxes.keys() | self._kinds.keys() | self._entries.common.keys()
        )
        return self.wanted

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: dcp.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Accept the state dict to fill and the index of the checkpoint."""
        if metadata is None:
            raise CheckpointingException("a load needs the index of the checkpoint, got None")
        if self._state_dict is not state_dict:
            self.take(state_dict)
        self._metadata = metadata
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """List the reads of this rank, after checking that all of them fit.

        Raises:
            CheckpointingException: A key is missing, a dtype or shape differs, or the checkpoint
                lacks elements. The text lists at most 20 problems.
        """
        self._start_over()
        items = [item for name in self._kinds for item in self._plan_bytes(name, "an object")]
        items += self._plan_common() + self._plan_tensors()
        if self._problems:
            raise CheckpointingException(
                titled_list("the checkpoint does not fit the state dict", self._problems)
            )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Accept all plans: ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Accept the plan. Targets change from here on."""
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
        """Decode an object or unpickle a common value.

        Raises:
            CheckpointingException: It cannot be decoded.
        """
        name = read_item.dest_index.fqn
        try:
            kind = self._kinds.get(name, ShardedObject)
            found = kind.decode(value, weights_only=self._weights_only)
        except Exception as error:
            # Of a refusal, torch's text has a page of advice around the name of the class.
            refused = re.search(r"Unsupported \w+: GLOBAL ([\w.]+)", str(error))
            if self._weights_only and refused:
                problem = f": it holds a {refused[1]}, and that may run code"
                remedy = "Pass weights_only=False if you trust the file"
            elif isinstance(error, ImportError | AttributeError):
                problem = f": this program lacks its class ({describe_error(error)})"
                remedy = "Make the class importable under that name"
            else:
                problem = f" ({describe_error(error)})"
                remedy = "Load it with the version of the program that saved it"
            raise CheckpointingException(
                f"key {name!r} cannot be unpickled{problem}. {remedy}, or leave the key out"
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
            A new dict. Each tensor is the ``data`` that was filled.
        """
        values = dict(self._results)
        values.update(self._entries.local)
        named = [(path, obj.unique_key, obj.data) for path, obj in self._entries.objects]
        named += [(path, name, value) for name, (path, value) in self._entries.common.items()]
        for path, name, local in named:
            if path not in values:
                values[path] = self._values.get(name, local)
        return state_tree.rebuild_state_dict(self._state_dict or {}, values)

    def _plan_common(self) -> list[ReadItem]:
        items: list[ReadItem] = []
        for name, (path, local) in self._entries.common.items():
            saved = self._metadata.state_dict_metadata.get(name)
            if not isinstance(saved, dcp.TensorStorageMetadata):
                items += self._plan_bytes(name, "a value")
                continue
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
            items += self._plan_reads(name, [target])
        return items

    def _plan_tensors(self) -> list[ReadItem]:
        items: list[ReadItem] = []
        tensors = self._entries.tensors
        every = zip(tensors, list_local([shard for _, shard in tensors]), strict=True)
        for key, group in groupby(every, key=lambda one: one[0][1].key):
            targets = []
            for ((path, shard), local), (_, shape) in zip(group, self.boxes[key], strict=True):
                self._results[path], target = _make_target(shard, local, shape)
                if self._is_lacking(key, target):
                    self._results[path] = shard.data
                targets.append(target)
            items += self._plan_reads(key, targets)
        return items

    def _plan_bytes(self, name: str, wanted: str) -> list[ReadItem]:
        saved = self._metadata.state_dict_metadata.get(name)
        if isinstance(saved, dcp.BytesStorageMetadata):
            nowhere = torch.Size([0])
            index = dcp.MetadataIndex(name)
            return [ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)]
        if saved is not None:
            self._problems.append(f"key {name!r}: the checkpoint has a tensor, not {wanted}")
        else:
            self._note_missing(name)
        return []

    def _plan_reads(self, key: str, targets: list[Target]) -> list[ReadItem]:
        saved = self._metadata.state_dict_metadata.get(key)
        if saved is None:
            if any(self._is_lacking(key, target) for target in targets):
                self._note_missing(key)
            return []
        problems = [problem for t in targets if (problem := _find_problem(key, saved, t))]
        if problems or not isinstance(saved, dcp.TensorStorageMetadata):
            self._problems += dict.fromkeys(problems)
            return []
        filled = [target for target in targets if target.tensor.numel()]
        if key in self._targets:
            self._problems.append(f"key {key!r} names a tensor and a plain value. Rename one")
        self._targets[key] = [target.tensor for target in filled]
        boxes = [(torch.Size(target.offset), torch.Size(target.shape)) for target in filled]
        chunks = [dcp.ChunkStorageMetadata(*box) for box in boxes]
        if chunks == saved.chunks and len(chunks) == 1:  # torch needs ten times as long for it
            offset, sizes = boxes[0]
            index = dcp.MetadataIndex(key, offset, 0)
            nowhere = torch.Size([0] * len(sizes))
            items = [ReadItem(LoadItemType.TENSOR, index, nowhere, index, nowhere, sizes)]
        else:
            items = create_read_items_for_chunk_list(key, saved, chunks)
        self._check_filling(key, saved, filled, items)
        return items

    def _is_lacking(self, key: str, target: Target) -> bool:
        """Return whether the checkpoint lacks a key. Tensors without elements need none."""
        return key not in self._metadata.state_dict_metadata and prod(target.global_shape) > 0

    def _check_filling(
        self,
        key: str,
        saved: dcp.TensorStorageMetadata,
        targets: list[Target],
        items: list[ReadItem],
    ) -> None:
        """Record holes, casts, and targets to zero because the checkpoint has another shape."""
        boxes: list[list[Box]] = [[] for _ in targets]
        for item in items:
            boxes[item.dest_index.index or 0].append(
                (tuple(item.dest_offsets), tuple(item.lengths))
            )
        for target, inside in zip(targets, boxes, strict=True):
            elements = sum(prod(lengths) for _, lengths in inside)
            if len(inside) > 1 and have_shared_elements(inside):
                self._problems.append(
                    f"key {key!r}: pieces in the checkpoint overlap. It was not saved by this "
                    "package, or changed since. Take another checkpoint"
                )
            if tuple(saved.size) != target.global_shape:
                self._zeroed.append(target.tensor)
            elif elements != target.tensor.numel():
                self._problems.append(
                    f"key {key!r}: the checkpoint has {elements} of the {target.tensor.numel()} "
                    f"elements at offset {target.offset} shape {target.shape}. It was not saved "
                    "whole"
                )
        if targets and saved.properties.dtype != targets[0].tensor.dtype:
            self._casts.append(
                f"{key!r} from {saved.properties.dtype} to {targets[0].tensor.dtype}"
            )

    def _note_missing(self, name: str) -> None:
        if self._strict:
            self._problems.append(
                f"key {name!r} is missing in the checkpoint. Pass strict=False to keep the local "
                "value"
            )


def _make_target(
    shard: ShardedTensor, local: torch.Tensor | None, shape: Shape
) -> tuple[torch.Tensor, Target]:
    """Return the result of a load for a shard, new if it has no data, and the target in it."""
    data = shard.data
    if data is None or local is None:
        data = local = torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
    if data.is_meta:
        raise CheckpointingException(
            f"key {shard.key!r} is on the meta device. Materialise it before the load, with "
            "module.to_empty(device=...) for instance"
        )
    local = local.detach()
    _require_fillable(shard.key, local)
    inside = Target(
        local[(None,) * shard.prepend_axis_num + (...,)],
        shard.global_shape,
        shard.global_offset,
        shape,
        shard.allow_shape_mismatch,
    )
    return data, inside


def _find_problem(
    key: str, saved: dcp.TensorStorageMetadata | dcp.BytesStorageMetadata, target: Target
) -> str | None:
    """Return why a tensor of the checkpoint cannot be read into a target, or None."""
    if not isinstance(saved, dcp.TensorStorageMetadata):
        return f"key {key!r}: the checkpoint has an object, not a tensor"
    found, wanted = saved.properties.dtype, target.tensor.dtype
    if found != wanted and not (found.is_floating_point and wanted.is_floating_point):
        return f"key {key!r}: the checkpoint has dtype {found}, expected {wanted}"
    shape = tuple(saved.size)
    if shape == target.global_shape:
        return None
    has_as_many_axes = len(shape) == len(target.global_shape)
    if not has_as_many_axes or not target.allow_shape_mismatch:
        hint = ". allow_shape_mismatch=True reads the overlap and zeroes the rest"
        return (
            f"key {key!r}: the checkpoint has global shape {shape}, expected "
            f"{target.global_shape}{hint if has_as_many_axes else ''}"
        )
    return None


def _has_shared_elements(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor have one place in memory."""
    span = 1  # of the axes with smaller strides
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    axes = sorted((step, size) for step, size in sizes if size > 1)
    for step, size in axes:
        if step < span:
            break
        span = step * (size - 1) + span
    else:
        return False
    if not axes[0][0] or not tensor.numel():
        return bool(tensor.numel())
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for step, size in axes:  # interleaved strides: few tensors come here
        places = (places[:, None] + step * torch.arange(size, device="cpu")).flatten()
    return len(set(places.tolist())) < len(places)


def _require_fillable(key: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"is not plain memory (layout {tensor.layout}, dtype {tensor.dtype})"
    elif _has_shared_elements(tensor):
        problem = "is expanded or overlaps itself: several elements share memory. clone() it first"
    elif tensor.is_inference() and not torch.is_inference_mode_enabled():
        problem = (
            "was made in inference mode and cannot change outside of it. Load in inference mode, "
            "or make it with torch.no_grad()"
        )
    else:
        return
    raise CheckpointingException(f"key {key!r}: the tensor to fill {problem}")
