"""Builders of sharded tensors and objects from the entries of a module's state dict."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.sharded import ReplicaId, ShardedStateDict, ShardedTensor
from mcore.parallel.checkpoint.state_tree import replace_fields, replica_index, shard_of_dtensor
from mcore.parallel.groups import GroupLike, as_process_group, get_pg_size, group_ranks, world_size
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.torch_compat import is_distributed
from mcore.tensor.dtensor import is_dtensor
from mcore.tensor.param_flags import ensure_params_ready

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GROUP_OPTIONS = frozenset({"tp_group", "dp_cp_group"})
_FIELD_OPTIONS = frozenset({"allow_shape_mismatch", "flattened_range"})
# The names of the modules inside wrappers of torch. state_dict() drops them from its keys, except
# for torch.compile, and a model is saved and loaded with and without each wrapper.
_INSIDE_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
# Wrappers of Megatron-LM, Megatron-FSDP and Megatron Bridge by class name: they are not imported.
# _BaseDataParallel is the base of the adapters, whose names differ between releases.
MEGATRON_WRAPPERS = frozenset({"_BaseDataParallel", "DistributedDataParallel", "Float16Module"}) | {
    "FullyShardedDataParallel",
    "MegatronFSDP",
    "TorchFullyShardedDataParallel",
}
Offsets = Sequence[Sequence[int]]


def strip_wrapper_names(name: str) -> str:
    """Return a name or prefix of modules without the names that wrappers of torch insert."""
    if "_mod" not in name:  # the usual case first: there is a call for each tensor of a model
        return name
    *parents, last = name.split(".")
    return ".".join([*(parent for parent in parents if parent not in _INSIDE_WRAPPERS), last])


def is_of_megatron(model: object, names: Collection[str]) -> bool:
    """Return whether a class of a model is one of Megatron's classes, also a copied one."""
    return any(
        cls.__name__ in names and cls.__module__.partition(".")[0].startswith("megatron")
        for cls in type(model).__mro__
    )


def look_inside_megatron(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in wrappers of Megatron-LM, which have no name in its state dict."""
    while (inner := module._modules.get("module")) and is_of_megatron(module, MEGATRON_WRAPPERS):
        module = inner
    return module


class UnknownGroupError(RuntimeError, ValueError):
    """A group is neither given nor implied. A guess could write tensors twice or not at all."""


class _OneRank:
    """A group of this rank alone. torch makes one only with communication."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "one rank"


ONE_RANK = _OneRank()


class CheckpointRanks(NamedTuple):
    """This rank's part of a parameter, and the number of its replica."""

    tp_group: GroupLike
    tp_size: int
    tp_rank: int
    dp_cp_rank: int

    @property
    def replica_id(self) -> tuple[int, int, int]:
        """The replica id of a tensor or object that every rank of both groups holds."""
        return (0, self.tp_rank, self.dp_cp_rank)


def resolve_ranks(
    tp_group: GroupLike | None, dp_cp_group: GroupLike | None, *, need_dp_cp: bool = True
) -> CheckpointRanks:
    """Return this rank's place in the groups of a single tensor, see :func:`resolve_groups`."""
    tp_group, dp_cp_group = resolve_groups(tp_group, dp_cp_group, need_dp_cp=need_dp_cp)
    tp_size, tp_rank = _get_size_and_rank(tp_group)
    return CheckpointRanks(tp_group, tp_size, tp_rank, _get_size_and_rank(dp_cp_group)[1])


def resolve_groups(
    tp_group: GroupLike | None,
    dp_cp_group: GroupLike | None,
    *,
    pp_group: GroupLike | None = None,
    model_sizes: tuple[int, int] | None = None,
    need_dp_cp: bool = True,
) -> tuple[GroupLike, GroupLike]:
    """Return both groups: the given one, else the default ProcessGroups', else size 1 if certain.

    ``model_sizes`` are the tp and pp sizes of a whole model. A size of 1 rules out a missing group.
    """
    default = get_default_process_groups() if tp_group is None or dp_cp_group is None else None
    if default is not None:
        tp_group = default.tp if tp_group is None else tp_group
        dp_cp_group = default.dp_cp if dp_cp_group is None else dp_cp_group
        pp_group = default.pp if pp_group is None else pp_group
    if tp_group is not None and dp_cp_group is not None:
        return tp_group, dp_cp_group
    world = world_size()
    # If the known groups fill the world, each unknown group can only have this rank in it.
    stages = model_sizes[1] if pp_group is None and model_sizes else get_pg_size(pp_group)
    model_ranks = get_pg_size(tp_group) * stages
    fills_world = world == 1 or model_ranks * get_pg_size(dp_cp_group) == world
    if tp_group is None:
        if not fills_world and (model_sizes is None or model_sizes[0] > 1):
            raise _report_unknown_group("tp_group", "tp", world)
        tp_group = ONE_RANK
    if dp_cp_group is not None or fills_world or not need_dp_cp:
        return tp_group, ONE_RANK if dp_cp_group is None else dp_cp_group
    if model_sizes is None or model_ranks > 1:
        raise _report_unknown_group("dp_cp_group", "dp_cp", world)
    return tp_group, cast("dist.ProcessGroup", dist.group.WORLD)


def _get_size_and_rank(group: GroupLike) -> tuple[int, int]:
    member = as_process_group(group)
    return (1, 0) if member is None else (member.size(), member.rank())


def _report_unknown_group(name: str, field: str, world: int) -> UnknownGroupError:
    return UnknownGroupError(
        f"{name} is not given, there is no default ProcessGroups with a {field} group, and the "
        f"known groups do not fill the world of {world} ranks: a tensor could be written twice or "
        f"not at all. Pass {name}=..., metadata[{name!r}] or a pg_collection with {field}, or call "
        "set_default_process_groups(ProcessGroups.from_sizes(...))"
    )


def make_tp_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    **kwargs: Any,
) -> ShardedTensor:
    """Describe a tensor that is cut along one axis over the tensor-parallel group.

    No communication. Works on meta tensors. A DTensor is described by its placements. If its mesh
    lacks the tensor-parallel ranks, the cut over them is added.

    Args:
        tensor: This rank's shard. It becomes ``data`` itself, not a copy.
        key: Name in the checkpoint.
        tp_axis: The axis that is cut. Negative numbers count from the end.
        replica_id: Number of this replica. None means ``(0, 0, rank among the replicas)``.
        prepend_offsets: ``(axis, index, count)`` of axes put before the axes of the tensor.
        kwargs: ``tp_group``, ``dp_cp_group`` (process group, 1-D mesh or None: the default
            ProcessGroups', else size 1 if that is certain) and ``allow_shape_mismatch``.

    Returns:
        The description.

    Raises:
        ValueError: ``tp_axis`` is outside the tensor, the tensor has no axis, or this rank is not
            in a group.
        TypeError: An unknown keyword.
        RuntimeError: A group is unknown while the world has several ranks.
        CheckpointingException: Wrong offsets.

    Example:
        >>> shard = make_tp_sharded_tensor_for_checkpoint(torch.zeros(4, 6), "w", tp_axis=-1)
        >>> shard.global_shape, shard.replica_id
        ((4, 6), (0, 0, 0))
    """
    fields = _check_fields("make_tp_sharded_tensor_for_checkpoint", kwargs)
    if not -tensor.ndim <= tp_axis < tensor.ndim:
        hint = "" if tensor.ndim else ". Use make_sharded_tensor_for_checkpoint for a 0-d tensor"
        shape = tuple(tensor.shape)
        raise ValueError(
            f"key {key!r}: tp_axis {tp_axis} is outside a tensor of shape {shape}{hint}"
        )
    axis = tp_axis % tensor.ndim
    if is_dtensor(tensor):
        shard = shard_of_dtensor(tensor, key, replica_id, **fields)
        ranks = _resolve_ranks_outside(tensor.device_mesh, kwargs)
        if ranks is not None:
            shard = _cut_over_tensor_parallel(shard, axis, ranks)
        return _prepend_axes(shard, prepend_offsets)
    ranks = resolve_ranks(*_get_groups(kwargs), need_dp_cp=replica_id is None)
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *prepend_offsets,
        (axis + len(prepend_offsets), ranks.tp_rank, ranks.tp_size),
        replica_id=(0, 0, ranks.dp_cp_rank) if replica_id is None else replica_id,
        prepend_axis_num=len(prepend_offsets),
        **fields,
    )


def make_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """Describe a tensor of which every tensor- and data-parallel rank has a replica.

    No communication. Works on meta tensors. A DTensor is described by its placements.

    Args:
        tensor: The tensor. It becomes ``data`` itself, not a copy.
        key: Name in the checkpoint.
        prepend_offsets: ``(axis, index, count)`` of axes put before the axes of the tensor.
        replica_id: Number of this replica. None means ``(0, tp rank, rank among the replicas)``.
        kwargs: ``tp_group``, ``dp_cp_group`` (process group, 1-D mesh or None: the default
            ProcessGroups', else size 1 if that is certain) and ``allow_shape_mismatch``.

    Returns:
        The description.

    Raises:
        ValueError: This rank is not in a group.
        TypeError: An unknown keyword.
        RuntimeError: A group is unknown while the world has several ranks.
        CheckpointingException: Wrong offsets.

    Example:
        >>> shard = make_sharded_tensor_for_checkpoint(torch.zeros(3), "norm", ((0, 1, 4),))
        >>> shard.global_shape, shard.global_offset
        ((4, 3), (1, 0))
    """
    fields = _check_fields("make_sharded_tensor_for_checkpoint", kwargs)
    if is_dtensor(tensor):
        shard = shard_of_dtensor(tensor, key, replica_id, **fields)
        ranks = _resolve_ranks_outside(tensor.device_mesh, kwargs) if replica_id is None else None
        if ranks is not None:
            shard = replace_fields(shard, replica_id=(0, ranks.tp_rank, replica_index(tensor)))
        return _prepend_axes(shard, prepend_offsets)
    if replica_id is None:
        replica_id = resolve_ranks(*_get_groups(kwargs)).replica_id
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *prepend_offsets,
        replica_id=replica_id,
        prepend_axis_num=len(prepend_offsets),
        **fields,
    )


def _resolve_ranks_outside(mesh: DeviceMesh, kwargs: dict[str, Any]) -> CheckpointRanks | None:
    """Resolve the tensor-parallel group if a DTensor's mesh does not include its ranks."""
    if is_distributed() and mesh.size() == dist.get_world_size():
        return None  # its placements describe every parallelism
    ranks = resolve_ranks(*_get_groups(kwargs), need_dp_cp=False)
    member = as_process_group(ranks.tp_group)
    includes_group = isinstance(member, dist.ProcessGroup) and set(group_ranks(member)) <= set(
        mesh.mesh.flatten().tolist()
    )
    return None if includes_group or "tp" in (mesh.mesh_dim_names or ()) else ranks


def _cut_over_tensor_parallel(
    shard: ShardedTensor, axis: int, ranks: CheckpointRanks
) -> ShardedTensor:
    """Turn the global tensor of a shard into one of ``tp_size`` equal slices along ``axis``."""
    size = shard.global_shape[axis]
    shape, offset = list(shard.global_shape), list(shard.global_offset)
    shape[axis] = size * ranks.tp_size
    offset[axis] += size * ranks.tp_rank
    counts = list(shard.axis_fragmentations or ())
    if counts:
        counts[axis] *= ranks.tp_size
    return replace_fields(
        shard, global_shape=shape, global_offset=offset, axis_fragmentations=counts or None
    )


def _prepend_axes(shard: ShardedTensor, prepend_offsets: Offsets) -> ShardedTensor:
    """Put stacked axes before the axes of a shard without any."""
    if not prepend_offsets:
        return shard
    stack = ShardedTensor.from_rank_offsets(
        shard.key,
        torch.empty((), device="cpu"),
        *prepend_offsets,
        prepend_axis_num=len(prepend_offsets),
    )
    counts = shard.axis_fragmentations
    return replace_fields(
        shard,
        global_shape=stack.global_shape + shard.global_shape,
        global_offset=stack.global_offset + shard.global_offset,
        axis_fragmentations=None if counts is None else stack.global_shape + counts,
        prepend_axis_num=len(prepend_offsets),
    )


def make_sharded_object_for_checkpoint(
    obj: Any,
    key: str,
    sharded_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    tp_group: GroupLike | None = None,
    dp_cp_group: GroupLike | None = None,
    **kwargs: Any,
) -> ShardedObject:
    """Describe a picklable object as one shard of an array of objects.

    No communication.

    Args:
        obj: The object.
        key: Name of the array in the checkpoint.
        sharded_offsets: ``(axis, index, count)`` for the axes 0..n-1 of the array in any order.
            Without offsets the array has one object.
        replica_id: Number of this replica. None means ``(0, tp rank, rank among the replicas)``.
        tp_group: Tensor-parallel group. None is resolved as in the tensor builders.
        dp_cp_group: Data- and context-parallel group. None is resolved as in the tensor builders.
        kwargs: None are accepted. Any is an error.

    Returns:
        The description.

    Raises:
        ValueError: The axes are not 0..n-1, or this rank is not in a group.
        TypeError: An unknown keyword.
        RuntimeError: A group is unknown while the world has several ranks.
        CheckpointingException: An index outside its count.

    Example:
        >>> make_sharded_object_for_checkpoint(b"state", "rng", ((0, 1, 4),)).unique_key
        'rng/shard_1_4'
    """
    _reject_unknown("make_sharded_object_for_checkpoint", kwargs, frozenset())
    if replica_id is None:
        replica_id = resolve_ranks(tp_group, dp_cp_group).replica_id
    offsets = sorted(tuple(offset) for offset in sharded_offsets) or [(0, 0, 1)]
    if [offset[0] for offset in offsets] != list(range(len(offsets))):
        raise ValueError(
            f"key {key!r}: sharded_offsets {tuple(sharded_offsets)} of an object must name the "
            f"axes 0 to {len(offsets) - 1}, each once"
        )
    return ShardedObject(
        key=key,
        data=obj,
        global_shape=tuple(count for _, _, count in offsets),
        global_offset=tuple(place for _, place, _ in offsets),
        replica_id=replica_id,
    )


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: GroupLike | None = None,
    dp_cp_group: GroupLike | None = None,
) -> ShardedStateDict:
    """Describe every entry of a module's state dict.

    No communication. Works on meta tensors.

    Args:
        state_dict: Names to tensors, as from ``state_dict(keep_vars=True)``.
        prefix: Put before each name, without the names that wrappers of torch insert, to make the
            key.
        tensor_parallel_layers_axis_map: Names that are cut over the tensor-parallel group, with
            the axis. All other tensors are replicated.
        sharded_offsets: ``(axis, index, count)`` of axes put before the axes of each tensor.
        extra_state_suffix: Entries with this suffix in their names become objects.
        tp_group: Tensor-parallel group. None is resolved as in the single builders.
        dp_cp_group: Data- and context-parallel group. None is resolved as in the single builders.

    Returns:
        Keys to descriptions, each key equal to its value's ``key``.

    Raises:
        TypeError: An entry is neither a tensor nor extra state.
        ValueError, RuntimeError, CheckpointingException: As in the single builders.

    Example:
        >>> sharded = make_sharded_tensors_for_checkpoint({"weight": torch.zeros(2)}, "layer.")
        >>> sharded["layer.weight"].key
        'layer.weight'
    """
    axes = tensor_parallel_layers_axis_map or {}
    groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    # Equal for all entries, and resolved at the first use. Placements describe a DTensor instead.
    replica_id = functools.cache(lambda: resolve_ranks(tp_group, dp_cp_group).replica_id)
    sharded: ShardedStateDict = {}
    for given, value in state_dict.items():
        name = strip_wrapper_names(given)
        key = prefix + name
        axis = axes.get(given, axes.get(name))
        shard: ShardedTensor | ShardedObject
        if name.endswith(extra_state_suffix):
            shard = make_sharded_object_for_checkpoint(value, key, sharded_offsets, replica_id())
        elif not isinstance(value, torch.Tensor):
            raise TypeError(
                f"key {key!r}: expected a tensor, got {type(value).__name__}. Only names that end "
                f"with {extra_state_suffix!r} may have other objects"
            )
        elif axis is not None:
            shard = make_tp_sharded_tensor_for_checkpoint(
                value, key, axis, prepend_offsets=sharded_offsets, **groups
            )
        elif is_dtensor(value):
            shard = make_sharded_tensor_for_checkpoint(value, key, sharded_offsets, **groups)
        else:  # nearly all tensors: the single builder would check the keywords of each
            shard = ShardedTensor.from_rank_offsets(
                key,
                value,
                *sharded_offsets,
                replica_id=replica_id(),
                prepend_axis_num=len(sharded_offsets),
            )
        sharded[key] = shard
    return sharded


def ensure_metadata_has_dp_cp_group(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of ``metadata`` that has the key ``dp_cp_group``.

    The caller's dict does not change, so no process group gets into a saved configuration. No
    communication.

    Args:
        metadata: The ``metadata`` argument of ``sharded_state_dict`` calls, or None.

    Returns:
        A new dict. If the key was missing, its value is the default ProcessGroups' ``dp_cp``, or
        None, which the builders resolve.

    Raises:
        TypeError: ``metadata`` is not a mapping.

    Example:
        >>> ensure_metadata_has_dp_cp_group(None)
        {'dp_cp_group': None}
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict or None, got {type(metadata).__name__}")
    found = dict(metadata or {})
    if "dp_cp_group" not in found:
        default = get_default_process_groups()
        found["dp_cp_group"] = None if default is None else default.dp_cp
    return found


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: Mapping[str, Any] | None = None,
    tp_group: GroupLike | None = None,
) -> ShardedStateDict:
    """Return a module's sharded state dict from its method, or describe its tensors as replicated.

    No communication. Works on meta tensors.

    Args:
        module: A module with a ``sharded_state_dict`` method, or any other. Wrappers of Megatron-LM
            around it have no part in the keys.
        prefix: Put before each name to make the key.
        sharded_offsets: ``(axis, index, count)`` of axes put before the axes of each tensor.
        metadata: Passed to the method. For modules without the method, its ``tp_group`` and
            ``dp_cp_group`` are used. Not changed.
        tp_group: Tensor-parallel group. It overrides the group in ``metadata``.

    Returns:
        Keys to descriptions. Their ``data`` are the live parameters and buffers.

    Raises:
        TypeError: ``metadata`` is not a mapping.
        ValueError, RuntimeError, CheckpointingException: As in the builders.

    Example:
        >>> sharded = sharded_state_dict_default(torch.nn.Linear(2, 1), "head.")
        >>> sorted(sharded)
        ['head.bias', 'head.weight']
    """
    module = look_inside_megatron(module)
    describe = getattr(module, "sharded_state_dict", None)
    if describe is not None:
        if tp_group is not None:
            metadata = {**(metadata or {}), "tp_group": tp_group}
        described: ShardedStateDict = describe(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )
        return described
    known = ensure_metadata_has_dp_cp_group(metadata)
    ensure_params_ready(module.parameters())
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {},
        sharded_offsets,
        tp_group=known.get("tp_group") if tp_group is None else tp_group,
        dp_cp_group=known["dp_cp_group"],
    )


def _get_groups(kwargs: dict[str, Any]) -> tuple[GroupLike | None, GroupLike | None]:
    return kwargs.get("tp_group"), kwargs.get("dp_cp_group")


def _check_fields(function: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a ShardedTensor among the keywords. Unknown keywords are a TypeError."""
    _reject_unknown(function, kwargs, _GROUP_OPTIONS | _FIELD_OPTIONS)
    return {name: kwargs[name] for name in _FIELD_OPTIONS if name in kwargs}


def _reject_unknown(function: str, kwargs: dict[str, Any], known: frozenset[str]) -> None:
    if not kwargs.keys() <= known:
        unknown = sorted(kwargs.keys() - known)
        hint = f". Known: {', '.join(sorted(known))}" if known else ""
        raise TypeError(f"{function}() got unknown keywords {', '.join(unknown)}{hint}")
