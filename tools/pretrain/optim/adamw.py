"""AdamW with moments from the start, so a checkpoint can be loaded, and gradient clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from mcore.parallel import get_pg_size, param_is_not_tensor_parallel_duplicate
from mcore.parallel.checkpoint import ShardedTensor
from mcore.tensor import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
    to_local_if_dtensor,
)
from mcore.tensor.param_flags import param_is_not_shared
from pretrain.model.experts import is_expert
from pretrain.settings import Settings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingOptimizer(Protocol):
    """The optimizer of the training loop. All ranks call each method together."""

    params: Sequence[torch.nn.Parameter]
    adamw: AdamW

    def accumulate_gradients(self, *, is_whole: bool = True) -> None:
        """Add the gradients of one micro-batch. Call after each backward.

        If a micro-batch has several backwards, ``is_whole`` is False for all but one of them.
        """
        ...

    def reduce_gradients(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Average gradients and loss over micro-batches and replicas. Returns the mean loss."""
        ...

    def clip_gradients(self, limit: float) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``limit``. Returns the norm before."""
        ...

    def step(self, learning_rate: float, norm: torch.Tensor) -> None:
        """Update the parameters if ``norm`` is finite, and discard the gradients. Never waits."""
        self.adamw.step(learning_rate, norm)

    def sharded_state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """The states as ``optimizer.<name>.<key>``, sharded like the parameters of a model."""
        places = {id(param): place for place, param in enumerate(self.params)}
        state: dict[str, Any] = {}
        for key, value in model_state.items():
            if not isinstance(value, ShardedTensor) or id(value.data) not in places:
                continue
            for name, tensor in self.list_states(places[id(value.data)]):
                new_key = f"optimizer.{name}.{key}"
                state[new_key] = dataclasses.replace(
                    value, key=new_key, data=tensor, dtype=tensor.dtype
                )
        return state

    def list_states(self, place: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and tensor of all states of the parameter at a place."""
        ...


class AdamW:
    """``torch.optim.AdamW`` over given weights. Decays weights of two or more dimensions.

    Calls torch's function: its class imports the compiler, which takes a second at every start.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], settings: Settings) -> None:
        self.weights, self._settings = weights, settings
        self._state: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
        for weight in weights:
            moments = [torch.zeros_like(weight.detach()) for _ in _MOMENTS]
            # The fused update counts on the weight's device.
            self._state[weight] = (*moments, torch.zeros((), device=weight.device))

    @property
    def updates(self) -> int:
        """Number of updates."""
        return int(self._state[self.weights[0]][-1].item())

    def set_updates(self, updates: int) -> None:
        """Set the number of updates."""
        for weight in self.weights:
            self._state[weight][-1].fill_(updates)

    @torch.no_grad()
    def step(self, learning_rate: float, norm: torch.Tensor) -> None:
        """Update the weights if the norm is finite, as the device decides. Discard gradients."""
        given, found_inf = self._settings, norm.isfinite().logical_not_().float()
        updated: list[Any] = [weight for weight in self.weights if weight.grad is not None]
        for is_matrix, decay in ((True, given.weight_decay), (False, 0.0)):
            some = [weight for weight in updated if (weight.dim() >= 2) == is_matrix]
            # Of plain shards: torch plans each new operation on DTensors, which takes long.
            local = [[to_local_if_dtensor(t) for t in (w, w.grad, *self._state[w])] for w in some]
            weights, grads, averages, squares, steps = ([t[n] for t in local] for n in range(5))
            adamw(
                weights, grads, averages, squares, [], steps, fused=True, found_inf=found_inf,
                beta1=given.adam_beta1, beta2=given.adam_beta2, amsgrad=False, lr=learning_rate,
                eps=given.adam_eps, weight_decay=decay, maximize=False,
            )  # fmt: skip
        for weight in updated:
            weight.grad = None

    def moments(self, weight: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each moment of a weight."""
        return zip(_MOMENTS, self._state[weight], strict=False)


def clip_to_norm(
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]],
    limit: float,
    *,
    tp_group: dist.ProcessGroup | None,
    shard_groups: Iterable[dist.ProcessGroup | None] = (),
    expert_groups: Iterable[dist.ProcessGroup | None] = (),
) -> torch.Tensor:
    """Scale gradients in place to a global norm of at most ``limit`` (0 only measures).

    One all-reduce over each of ``shard_groups`` and one over tp. Duplicates over tp and a shared
    embedding count once. If there are experts, one more over each of ``expert_groups``. Returns the
    norm before scaling, 0-d, equal on all ranks of the groups.
    """
    every = [gradient for _, gradient in gradients]
    counted = [
        gradient
        for parameter, gradient in gradients
        if not is_expert(parameter)
        and param_is_not_shared(parameter)
        and param_is_not_tensor_parallel_duplicate(parameter, tp_group=tp_group)
    ]
    flag = torch.zeros(1, dtype=torch.int, device=every[0].device)
    square = _reduce_square(counted, flag, (*shard_groups, tp_group))
    of_experts = [gradient for parameter, gradient in gradients if is_expert(parameter)]
    if of_experts:
        square += _reduce_square(of_experts, flag, expert_groups)
    norm = square.sqrt()
    if limit > 0:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        local_multi_tensor_applier(local_multi_tensor_scale, flag, [every, every], scale)
    total: torch.Tensor = norm[0]
    return total


def _reduce_square(
    gradients: list[torch.Tensor], flag: torch.Tensor, groups: Iterable[dist.ProcessGroup | None]
) -> torch.Tensor:
    """The squared norm ``[1]`` of gradients that are sharded over the groups."""
    norm, _ = local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [gradients], False)
    square: torch.Tensor = norm.square()
    for group in groups:
        if get_pg_size(group) > 1:
            dist.all_reduce(square, group=group)
    return square
