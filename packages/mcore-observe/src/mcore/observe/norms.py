"""L2 norms of gradients and parameters, of models on one rank or split over many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from mcore.observe.sinks.scalars import read_scalars, widest_float
from mcore.parallel.groups import GroupLike, as_process_group, get_pg_rank, get_pg_size
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.reductions import sum_over_group
from mcore.parallel.tensor_parallel import param_is_not_tensor_parallel_duplicate
from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor
from mcore.tensor.multi_tensor import local_multi_tensor_l2_norm
from mcore.tensor.param_flags import ensure_params_ready, param_is_not_shared

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PREFIX = "l2_norm/grad/"
_CHUNK_SIZE = 2048 * 32
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The mesh of a DTensor and the mesh dimensions that split it.
_ShardSet: TypeAlias = "tuple[DeviceMesh, tuple[int, ...]]"


def report_l2_norm_grad(
    model: torch.nn.Module | list[torch.nn.Module], *, group: GroupLike | None = None
) -> dict[str, float]:
    """Report the L2 norm of each parameter's gradient and of all of them together.

    The gradient of a parameter is its ``main_grad`` if it has one, else its ``grad``. Call the
    report after gradients are reduced and unscaled. DTensors are summed over the ranks that hold
    their shards, and all ranks of their mesh call it. Other gradients are those of this rank alone
    unless ``group`` is given: then one all-reduce sums the squares over the group, and all its
    ranks call it and get the result.

    Args:
        model: One module or a list of chunks.
        group: A group of ranks that hold shards of the same parameters. Parameters marked with
            ``tensor_model_parallel`` False are complete on every rank and count once.

    Returns:
        ``l2_norm/grad/{parameter}`` for each parameter that has a gradient, and
        ``l2_norm/grad/global``, 0.0 without gradients. A name that an earlier chunk has already
        gets the prefix ``chunk{i}.``, counting chunks from 0.

    Raises:
        RuntimeError: A gradient is a DTensor with a partial placement.

    Example:
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0]])
        >>> report_l2_norm_grad(layer)
        {'l2_norm/grad/weight': 3.0, 'l2_norm/grad/global': 3.0}
    """
    return read_scalars(gradient_norms(model, group=group))


@torch.no_grad()
def gradient_norms(
    model: torch.nn.Module | list[torch.nn.Module], *, group: GroupLike | None = None
) -> dict[str, Any]:
    """Compute the norms of :func:`report_l2_norm_grad` and leave them on the device."""
    named = dict(_iterate_gradients(model))
    if not named:
        return {f"{_PREFIX}global": 0.0}
    squares = _sum_squares_of_each([gradient for _, gradient in named.values()])
    if get_pg_size(group) > 1:
        counts = [  # a complete copy counts on the first rank alone
            getattr(parameter, "tensor_model_parallel", None) is not False
            or get_pg_rank(group) == 0
            for parameter, _ in named.values()
        ]
        counted = squares * torch.tensor(counts, dtype=squares.dtype, device=squares.device)
        (squares,) = sum_over_group([counted], group)
    roots = torch.cat([squares, squares.sum(0, keepdim=True)]).sqrt().to(torch.float32)
    return {
        _PREFIX + name: root for name, root in zip([*named, "global"], roots.unbind(), strict=True)
    }


@torch.no_grad()
def calc_params_l2_norm(
    model: torch.nn.Module | list[torch.nn.Module],
    model_config: Any,
    use_megatron_fsdp: bool = False,
    force_create_fp32_copy: bool = False,
    *,
    pg_collection: Any = None,
) -> float:
    """Return the L2 norm of all parameters over the whole job.

    Each value counts once: a parameter that every tensor-parallel rank holds complete counts on
    the first of them, and a parameter marked ``shared`` does not count. Squares are summed without
    a float32 copy.

    The collectives are sums over each of these groups with more than one rank: first ``dp_cp``, and
    ``expt_dp`` for experts, for main parameters that the optimizer splits, and the shards of
    DTensors. Then ``mp`` for dense parameters and ``tp_ep_pp`` for experts. All ranks call it, even
    without experts, and get the norm. One copy to the host.

    Args:
        model: One module or a list of chunks.
        model_config: An object with ``bf16`` and ``fp16``. If either is on, the ``main_param`` of
            a parameter counts instead of the parameter.
        use_megatron_fsdp: All parameters are DTensors of Megatron-FSDP. The
            ``stop_communication()`` of each chunk is called first, and the squares are summed over
            the shards alone.
        force_create_fp32_copy: Ignore ``main_param``.
        pg_collection: The groups ``tp, expt_tp, mp, tp_ep_pp, dp_cp, expt_dp``. A missing group has
            one rank. None means ``pg_collection`` of the model, else the default ProcessGroups,
            else one process.

    Returns:
        The norm; 0.0 without parameters.

    Raises:
        RuntimeError: ``use_megatron_fsdp`` and a parameter is not a DTensor, or a DTensor has a
            partial placement.

    Example:
        >>> layer = torch.nn.Linear(10, 20, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> round(calc_params_l2_norm(layer, None), 4)
        14.1421
    """
    chunks = model_chunks(model)
    if use_megatron_fsdp:
        for chunk in chunks:
            stop = getattr(chunk, "stop_communication", None)
            if callable(stop):
                stop()
        return _compute_dtensor_norm(p for chunk in chunks for p in chunk.named_parameters())
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    ensure_params_ready(parameters)
    groups = find_process_groups(pg_collection, model)
    tp, expt_tp = getattr(groups, "tp", None), getattr(groups, "expt_tp", None)
    is_half = any(getattr(model_config, name, False) is True for name in ("bf16", "fp16"))
    use_main = is_half and not force_create_fp32_copy
    # Keys: it belongs to an expert, and the optimizer splits it over data-parallel ranks.
    buckets: dict[tuple[bool, bool], list[torch.Tensor]] = {
        kind: [] for kind in product((False, True), (False, True))
    }
    for parameter in parameters:
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
            parameter, tp, expt_tp
        ):
            value, is_split = _find_counted_value(parameter, use_main=use_main)
            is_expert = getattr(parameter, "allreduce", True) is False
            if value is not None:
                buckets[is_expert, is_split].append(value)
    sums = [_sum_squares(bucket) for bucket in buckets.values()]
    device = next((s.device for s in sums if s.device.type != "cpu"), sums[0].device)
    dense, dense_split, expert, expert_split = (s.to(device).reshape(1) for s in sums)
    # Split values first: their sums over data-parallel ranks then count like unsplit values.
    dense_split, expert_split = _sum_pair(
        dense_split, getattr(groups, "dp_cp", None), expert_split, getattr(groups, "expt_dp", None)
    )
    dense, expert = _sum_pair(
        dense + dense_split,
        getattr(groups, "mp", None),
        expert + expert_split,
        getattr(groups, "tp_ep_pp", None),
    )
    return _copy_root(dense + expert)


@torch.no_grad()
def calc_dtensor_params_l2_norm(params: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of DTensors over all their shards.

    DTensors that are split over the same mesh dimensions share one all-reduce for each of these
    dimensions. Replicated dimensions are not summed over. All ranks of the mesh call it with the
    parameters in the same order, and get the norm.

    Args:
        params: DTensors. Shards may be empty.

    Returns:
        The norm, 0.0 without parameters.

    Raises:
        RuntimeError: A parameter is not a DTensor, or has a partial placement.

    Example:
        >>> calc_dtensor_params_l2_norm([])
        0.0
    """
    return _compute_dtensor_norm((f"parameter {i}", param) for i, param in enumerate(params))


def _iterate_gradients(model: Any) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    taken: set[str] = set()
    for index, chunk in enumerate(model_chunks(model)):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                gradient = parameter.grad
            if gradient is None or not parameter.requires_grad:
                continue
            unique = f"chunk{index}.{name}" if name in taken else name
            taken.add(unique)
            yield unique, (parameter, gradient)


def _find_counted_value(
    parameter: torch.Tensor, *, use_main: bool
) -> tuple[torch.Tensor | None, bool]:
    """Return the tensor that counts for a parameter, and whether the optimizer splits it."""
    if not use_main or not hasattr(parameter, "main_param"):
        return parameter, False
    main: torch.Tensor | None = parameter.main_param
    if getattr(parameter, "main_param_sharded", False):
        return main, True
    return (parameter if main is None else main), False


def _sum_pair(
    first: torch.Tensor,
    first_group: GroupLike | None,
    second: torch.Tensor,
    second_group: GroupLike | None,
) -> list[torch.Tensor]:
    """Sum each tensor over its group, in one collective if the groups have the same ranks."""
    if _list_ranks(first_group) == _list_ranks(second_group):
        return sum_over_group([first, second], first_group)
    return sum_over_group([first], first_group) + sum_over_group([second], second_group)


def _list_ranks(group: GroupLike | None) -> list[int] | None:
    member = as_process_group(group)
    return None if member is None else dist.get_process_group_ranks(member)


def _compute_dtensor_norm(named: Iterable[tuple[str, torch.Tensor]]) -> float:
    parameters: list[torch.Tensor] = []
    for name, parameter in named:
        if not is_dtensor(parameter):
            raise RuntimeError(
                f"{name} is a {type(parameter).__name__}, not a DTensor, so its shards are "
                "unknown: split the whole model, or call without use_megatron_fsdp"
            )
        parameters.append(parameter)
    ensure_params_ready(parameters)
    return _copy_root(_sum_squares(parameters))


def _copy_root(squares: torch.Tensor) -> float:
    """Return the square root on the host, rounded to float32."""
    return float(squares.sqrt().to(torch.float32).item())


def _sum_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of all elements, with one all-reduce for each set of split dimensions."""
    sums = [
        _sum_over_shards(
            _sum_local_squares([tensors[i] for i in members], together=True), shards
        ).squeeze(0)
        for shards, members in _group_by_shards(tensors).items()
    ]
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([s.to(sums[0].device) for s in sums]).sum()


def _sum_squares_of_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of each tensor separately, with the same all-reduces: ``[len(tensors)]``."""
    parts: list[torch.Tensor] = []
    order: list[int] = []
    for shards, members in _group_by_shards(tensors).items():
        squares = _sum_local_squares([tensors[i] for i in members], together=False)
        parts.append(_sum_over_shards(squares, shards))
        order += members
    unordered = torch.cat([part.to(parts[0].device) for part in parts])
    return torch.empty_like(unordered).index_copy_(
        0, torch.tensor(order, device=unordered.device), unordered
    )


def _group_by_shards(tensors: Sequence[torch.Tensor]) -> dict[_ShardSet | None, list[int]]:
    sets: dict[_ShardSet | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        shards: _ShardSet | None = None
        if is_dtensor(tensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise RuntimeError(
                    f"a DTensor of shape {tuple(tensor.shape)} has the placements "
                    f"{tensor.placements}, so its norm is unknown before it is reduced: "
                    "redistribute it first"
                )
            places = enumerate(tensor.placements)
            split = tuple(i for i, placement in places if not placement.is_replicate())
            shards = tensor.device_mesh, split
        sets.setdefault(shards, []).append(index)
    return sets


def _sum_local_squares(tensors: Sequence[torch.Tensor], *, together: bool) -> torch.Tensor:
    local: list[torch.Tensor] = []
    for tensor in tensors:
        shard = to_local_if_dtensor(tensor.detach())
        if shard.is_complex():
            shard = torch.view_as_real(shard)
        # The norm kernels lack the other types, such as float8.
        local.append(shard if shard.dtype in _SUMMABLE else shard.float())
    norm, norms = local_multi_tensor_l2_norm(_CHUNK_SIZE, None, [local], not together)
    found = norm if together else norms
    return found.to(widest_float(found.device)).square()


def _sum_over_shards(squares: torch.Tensor, shards: _ShardSet | None) -> torch.Tensor:
    if shards is None:
        return squares
    mesh, dims = shards
    for dim in dims:
        (squares,) = sum_over_group([squares], mesh.get_group(dim))
    return squares


def model_chunks(model: Any) -> list[Any]:
    """Return the virtual-pipeline chunks of a model: a list, one module, or None."""
    if model is None:
        return []
    return list(model) if isinstance(model, (list, tuple)) else [model]


def find_process_groups(pg_collection: Any, model: Any) -> Any:
    """Return the given groups, else the groups of the first chunk, else the default.

    A chunk without groups may wrap a module that has them. No communication. The result is None
    without default groups, which means one process.
    """
    if pg_collection is not None:
        return pg_collection
    chunk = next(iter(model_chunks(model)), None)
    while chunk is not None:
        found = getattr(chunk, "pg_collection", None)
        if found is not None:
            return found
        inner = getattr(chunk, "module", None)
        chunk = inner if isinstance(inner, torch.nn.Module) else None
    return get_default_process_groups()
