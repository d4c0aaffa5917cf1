"""The L2 norm of all parameters of a model that is split over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.model_groups import find_process_groups, model_chunks
from mcore.observe.shard_sums import sum_of_squares
from mcore.parallel.groups import GroupLike, as_process_group
from mcore.parallel.reductions import sum_over_group
from mcore.parallel.tensor_parallel import param_is_not_tensor_parallel_duplicate
from mcore.tensor.dtensor import is_dtensor
from mcore.tensor.param_flags import param_is_not_shared

__all__ = ["calc_dtensor_params_l2_norm", "calc_params_l2_norm"]


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
    also those without experts, and all get the norm. One copy to the host.

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
        RuntimeError: ``use_megatron_fsdp`` and a parameter is no DTensor, or a DTensor has a
            partial placement.

    Example:
        >>> layer = torch.nn.Linear(10, 20, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> round(calc_params_l2_norm(layer, None), 4)
        14.1421
    """
    chunks = model_chunks(model)
    if use_megatron_fsdp:
        return _fsdp_norm(chunks)
    groups = find_process_groups(pg_collection, model)
    use_main = not force_create_fp32_copy and _is_half(model_config)
    buckets = _Buckets()
    for chunk in chunks:
        for parameter in chunk.parameters():
            if _counts_here(parameter, groups):
                buckets.add(parameter, use_main=use_main)
    return _joint_norm(buckets, groups)


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
        RuntimeError: One is no DTensor, or has a partial placement.

    Example:
        >>> calc_dtensor_params_l2_norm([])
        0.0
    """
    named = [(f"parameter {index}", parameter) for index, parameter in enumerate(params)]
    return _dtensor_norm(named)


@dataclass
class _Buckets:
    """Values by how they are split: on this rank alone, or over data-parallel ranks too."""

    dense: list[torch.Tensor] = field(default_factory=list)
    dense_sharded: list[torch.Tensor] = field(default_factory=list)
    expert: list[torch.Tensor] = field(default_factory=list)
    expert_sharded: list[torch.Tensor] = field(default_factory=list)

    def add(self, parameter: torch.Tensor, *, use_main: bool) -> None:
        is_expert = getattr(parameter, "allreduce", True) is False
        whole, sharded = (
            (self.expert, self.expert_sharded) if is_expert else (self.dense, self.dense_sharded)
        )
        main = getattr(parameter, "main_param", None)
        if not use_main or not hasattr(parameter, "main_param"):
            whole.append(parameter)
        elif not getattr(parameter, "main_param_sharded", False):
            whole.append(parameter if main is None else main)
        elif main is not None:
            sharded.append(main)

    def squares(self) -> list[torch.Tensor]:
        """Return the four sums of squares of this rank, each ``[1]``, on one device."""
        sums = [
            sum_of_squares(tensors)
            for tensors in (self.dense, self.dense_sharded, self.expert, self.expert_sharded)
        ]
        device = next((s.device for s in sums if s.device.type != "cpu"), sums[0].device)
        return [s.to(device).reshape(1) for s in sums]


def _joint_norm(buckets: _Buckets, groups: Any) -> float:
    def group(name: str) -> GroupLike | None:
        found: GroupLike | None = getattr(groups, name, None)
        return found

    dense, dense_sharded, expert, expert_sharded = buckets.squares()
    dense_sharded, expert_sharded = _sum_pair(
        dense_sharded, group("dp_cp"), expert_sharded, group("expt_dp")
    )
    dense, expert = _sum_pair(
        dense + dense_sharded, group("mp"), expert + expert_sharded, group("tp_ep_pp")
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


def _counts_here(parameter: torch.Tensor, groups: Any) -> bool:
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
        parameter, getattr(groups, "tp", None), getattr(groups, "expt_tp", None)
    )


def _is_half(model_config: Any) -> bool:
    return any(getattr(model_config, name, False) is True for name in ("bf16", "fp16"))


def _fsdp_norm(chunks: list[Any]) -> float:
    for chunk in chunks:
        stop = getattr(chunk, "stop_communication", None)
        if callable(stop):
            stop()
    return _dtensor_norm(_named_parameters(chunks))


def _named_parameters(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        yield from chunk.named_parameters()


def _dtensor_norm(named: Iterable[tuple[str, torch.Tensor]]) -> float:
    parameters: list[torch.Tensor] = []
    for name, parameter in named:
        if not is_dtensor(parameter):
            raise RuntimeError(
                f"{name} is a {type(parameter).__name__}, not a DTensor: its shards are unknown; "
                "split the whole model, or call without use_megatron_fsdp"
            )
        parameters.append(parameter)
    return _root(sum_of_squares(parameters))


def _root(squares: torch.Tensor) -> float:
    """Return the root on the host, with the precision that the sums have."""
    return float(squares.sqrt().to(torch.float32).item())
