"""L2 norms of gradients and parameters, of models on one rank or split over many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from mcore.observe.model_groups import find_process_groups, model_chunks
from mcore.observe.sinks.scalars import read_scalars, widest_float
from mcore.parallel.groups import GroupLike, as_process_group, get_pg_rank, get_pg_size
from mcore.parallel.reductions import sum_over_group
from mcore.parallel.tensor_parallel import param_is_not_tensor_parallel_duplicate
from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor
from mcore.tensor.multi_tensor import local_multi_tensor_l2_norm
from mcore.tensor.param_flags import param_is_not_shared

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PREFIX = "l2_norm/grad/"
_CHUNK_SIZE = 2048 * 32
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The mesh of a DTensor and its dimensions over which the DTensor is split.
_ShardSet: TypeAlias = "tuple[DeviceMesh, tuple[int, ...]]"


def report_l2_norm_grad(
    model: torch.nn.Module | list[torch.nn.Module], *, group: GroupLike | None = None
) -> dict[str, float]:
    """Report the L2 norm of each parameter's gradient and of all of them together.

    Gradients are ``main_grad`` where a parameter has one, else ``grad``; call it after they are
    reduced and unscaled. DTensors are summed over the ranks that hold their shards; all ranks of
    their mesh call it. Everything else counts on this rank alone, unless ``group`` is given: then
    one all-reduce sums the squares over it, and all its ranks call it and get the result.

    Args:
        model: One module or a list of chunks.
        group: A group whose ranks hold shards of the same parameters. Those marked with
            ``tensor_model_parallel`` False are whole on every rank, and count once.

    Returns:
        ``l2_norm/grad/{parameter}`` for each parameter that has a gradient, and
        ``l2_norm/grad/global``, 0.0 when there is none. A name that an earlier chunk already has
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
    """Compute what :func:`report_l2_norm_grad` returns, left on the gradients' device."""
    named = dict(_named_gradients(model))
    if not named:
        return {f"{_PREFIX}global": 0.0}
    squares = _squares_of_each([gradient for _, gradient in named.values()])
    if get_pg_size(group) > 1:
        counts = [_gradient_counts_here(parameter, group) for parameter, _ in named.values()]
        own = squares * torch.tensor(counts, dtype=squares.dtype, device=squares.device)
        (squares,) = sum_over_group([own], group)
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

    Each value counts once: parameters that every tensor-parallel rank holds whole count on the
    first of them, those marked ``shared`` not at all. Squares are summed without a float32 copy.

    Collectives, all sums, each only over a group with more than one rank: main parameters that
    the optimizer splits over ``dp_cp``, and of experts over ``expt_dp``; DTensors over their
    shards; then dense parameters over ``mp`` and experts over ``tp_ep_pp``. All ranks call it,
    even those without experts, and all get the norm. One copy to the host.

    Args:
        model: One module or a list of chunks.
        model_config: Something with ``bf16`` and ``fp16``: with either on, a parameter's
            ``main_param`` counts where it has one.
        use_megatron_fsdp: All parameters are DTensors of Megatron-FSDP: each chunk's
            ``stop_communication()`` is called first, and only their shards are summed over.
        force_create_fp32_copy: Ignore ``main_param``.
        pg_collection: The groups ``tp, expt_tp, mp, tp_ep_pp, dp_cp, expt_dp``; a missing one has
            one rank. None takes ``pg_collection`` of the model, else the default ProcessGroups,
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
        return _dtensor_norm(named for chunk in chunks for named in chunk.named_parameters())
    groups = find_process_groups(pg_collection, model)
    use_main = not force_create_fp32_copy and _is_half(model_config)
    # By whether they belong to experts, and whether they are split over data-parallel ranks too.
    buckets: dict[tuple[bool, bool], list[torch.Tensor]] = {
        kind: [] for kind in product((False, True), (False, True))
    }
    for chunk in chunks:
        for parameter in chunk.parameters():
            if _parameter_counts_here(parameter, groups):
                value, is_split = _counted_value(parameter, use_main=use_main)
                is_expert = getattr(parameter, "allreduce", True) is False
                if value is not None:
                    buckets[is_expert, is_split].append(value)
    return _norm_over_groups(list(buckets.values()), groups)


@torch.no_grad()
def calc_dtensor_params_l2_norm(params: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of DTensors over all their shards.

    One all-reduce for each mesh dimension over which they are split, and each set of such
    dimensions; all ranks of the mesh call it with the parameters in the same order, and get the
    norm. Replicated dimensions are not summed over.

    Args:
        params: DTensors; shards may be empty.

    Returns:
        The norm; 0.0 for no parameters.

    Raises:
        RuntimeError: One is not a DTensor, or has a partial placement.

    Example:
        >>> calc_dtensor_params_l2_norm([])
        0.0
    """
    return _dtensor_norm((f"parameter {index}", param) for index, param in enumerate(params))


def _named_gradients(model: Any) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
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


def _gradient_counts_here(parameter: torch.Tensor, group: GroupLike | None) -> bool:
    is_whole = getattr(parameter, "tensor_model_parallel", None) is False
    return not is_whole or get_pg_rank(group) == 0


def _parameter_counts_here(parameter: torch.Tensor, groups: Any) -> bool:
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
        parameter, getattr(groups, "tp", None), getattr(groups, "expt_tp", None)
    )


def _is_half(model_config: Any) -> bool:
    return any(getattr(model_config, name, False) is True for name in ("bf16", "fp16"))


def _counted_value(parameter: torch.Tensor, *, use_main: bool) -> tuple[torch.Tensor | None, bool]:
    """Return the tensor that counts for a parameter, and whether the optimizer splits it."""
    if not use_main or not hasattr(parameter, "main_param"):
        return parameter, False
    main: torch.Tensor | None = parameter.main_param
    if getattr(parameter, "main_param_sharded", False):
        return main, True
    return (parameter if main is None else main), False


def _norm_over_groups(buckets: Sequence[Sequence[torch.Tensor]], groups: Any) -> float:
    """Return the norm of dense, split dense, expert and split expert values over their groups."""
    sums = [_sum_of_squares(bucket) for bucket in buckets]
    device = next((s.device for s in sums if s.device.type != "cpu"), sums[0].device)
    dense, dense_split, expert, expert_split = (s.to(device).reshape(1) for s in sums)
    dense_split, expert_split = _sum_pair(
        dense_split, getattr(groups, "dp_cp", None), expert_split, getattr(groups, "expt_dp", None)
    )
    dense, expert = _sum_pair(
        dense + dense_split,
        getattr(groups, "mp", None),
        expert + expert_split,
        getattr(groups, "tp_ep_pp", None),
    )
    return _root(dense + expert)


def _sum_pair(
    first: torch.Tensor,
    first_group: GroupLike | None,
    second: torch.Tensor,
    second_group: GroupLike | None,
) -> list[torch.Tensor]:
    """Sum each over its group; in one collective when the groups have the same ranks."""
    if _ranks(first_group) == _ranks(second_group):
        return sum_over_group([first, second], first_group)
    return sum_over_group([first], first_group) + sum_over_group([second], second_group)


def _ranks(group: GroupLike | None) -> list[int] | None:
    member = as_process_group(group)
    return None if member is None else dist.get_process_group_ranks(member)


def _dtensor_norm(named: Iterable[tuple[str, torch.Tensor]]) -> float:
    parameters: list[torch.Tensor] = []
    for name, parameter in named:
        if not is_dtensor(parameter):
            raise RuntimeError(
                f"{name} is a {type(parameter).__name__}, not a DTensor: its shards are unknown; "
                "split the whole model, or call without use_megatron_fsdp"
            )
        parameters.append(parameter)
    return _root(_sum_of_squares(parameters))


def _root(squares: torch.Tensor) -> float:
    """Return the root on the host, in the precision of the sums."""
    return float(squares.sqrt().to(torch.float32).item())


def _sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of all elements; one all-reduce for each set of dimensions with shards."""
    sums = [
        _summed_over_shards(
            _local_squares([tensors[i] for i in members], together=True), shards
        ).squeeze(0)
        for shards, members in _by_shards(tensors).items()
    ]
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([s.to(sums[0].device) for s in sums]).sum()


def _squares_of_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of each tensor by itself, with as many all-reduces: ``[len(tensors)]``."""
    parts: list[torch.Tensor] = []
    order: list[int] = []
    for shards, members in _by_shards(tensors).items():
        squares = _local_squares([tensors[i] for i in members], together=False)
        parts.append(_summed_over_shards(squares, shards))
        order += members
    unordered = torch.cat([part.to(parts[0].device) for part in parts])
    return torch.empty_like(unordered).index_copy_(
        0, torch.tensor(order, device=unordered.device), unordered
    )


def _by_shards(tensors: Sequence[torch.Tensor]) -> dict[_ShardSet | None, list[int]]:
    sets: dict[_ShardSet | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        sets.setdefault(_shard_set(tensor), []).append(index)
    return sets


def _shard_set(tensor: torch.Tensor) -> _ShardSet | None:
    if not is_dtensor(tensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(
            f"a DTensor of shape {tuple(tensor.shape)} has the placements {tensor.placements}; "
            "its norm is unknown before it is reduced: redistribute it first"
        )
    split = (i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tensor.device_mesh, tuple(split)


def _local_squares(tensors: Sequence[torch.Tensor], *, together: bool) -> torch.Tensor:
    local = [_summable(to_local_if_dtensor(tensor.detach())) for tensor in tensors]
    norm, norms = local_multi_tensor_l2_norm(_CHUNK_SIZE, None, [local], not together)
    found = norm if together else norms
    return found.to(widest_float(found.device)).square()


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _SUMMABLE else tensor.float()


def _summed_over_shards(squares: torch.Tensor, shards: _ShardSet | None) -> torch.Tensor:
    if shards is None:
        return squares
    mesh, dims = shards
    for dim in dims:
        (squares,) = sum_over_group([squares], mesh.get_group(dim))
    return squares
