"""The router of a layer of experts: the experts of each token, their weights, and its losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore.modules import MegatronModule
from mcore.observe import get_moe_metrics_tracker
from mcore.parallel import ProcessGroups, get_pg_size
from pretrain.model.configuration import ModelConfig
from pretrain.model.randomness import ParameterInit, inner_init
from pretrain.model.tensor_parallel import mark_partial_gradients


class Router(MegatronModule):
    """An fp32 linear from hidden states to experts that selects the ``topk`` likeliest.

    Its losses are attached to the gates: backward adds their gradient when the gradient of the
    model's loss arrives. So they need no path from the router to the last layer.
    """

    def __init__(
        self, config: ModelConfig, init: ParameterInit, name: str, groups: ProcessGroups, *,
        number: int,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.config: ModelConfig = config
        self.groups = groups
        self.number = number
        self.num_experts = config.num_moe_experts or 1
        shape = (self.num_experts, config.hidden_size)
        self.weight = init.shard(f"{name}.weight", shape, inner_init(config), axis=None)
        if get_pg_size(groups.tp) > 1:  # each tp rank has a part of the experts' outputs
            mark_partial_gradients([self.weight])

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[s, b, h]`` to gates and numbers of the experts of each token, ``[s, b, topk]``.

        In training one all-reduce of counts over ``dp_cp``, or over ``cp`` with ``--balance
        sequence``.
        """
        logits = F.linear(hidden.float(), self.weight.float())
        shares = logits.softmax(dim=-1)
        gates, chosen = choose(shares, self.config.moe_router_topk)
        if self.training and torch.is_grad_enabled():
            gates = self._attach_losses(gates, logits, shares, chosen)
        return gates, chosen

    def _attach_losses(
        self, gates: torch.Tensor, logits: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        per_sequence = "seq_aux_loss" in config.moe_router_load_balancing_type
        group = self.groups.cp if per_sequence else self.groups.dp_cp
        balance = balancing_loss(shares, chosen, group, per_sequence=per_sequence)
        size = logits.logsumexp(dim=-1).square().mean()
        name = "seq_load_balancing_loss" if per_sequence else "load_balancing_loss"
        values = {name: balance.detach(), "z_loss": size.detach()}
        loss = config.moe_aux_loss_coeff * balance + (config.moe_z_loss_coeff or 0.0) * size
        # All tp ranks have the same loss, and their gradients are summed.
        loss = loss / get_pg_size(self.groups.tp)
        noted = functools.partial(self._record, values)
        with_loss: torch.Tensor = _WithGradientOf.apply(  # type: ignore[no-untyped-call]
            gates, loss, noted
        )
        return with_loss

    def _record(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            get_moe_metrics_tracker().record(
                name, value, self.number + 1, self.config.num_blocks, avg_group=self.groups.dp_cp,
                needs_dp_avg=False,
            )  # fmt: skip


def choose(shares: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``topk`` largest of ``[..., experts]`` and their numbers. Lower numbers win ties.

    A single expert has its probability as weight (Fedus et al. 2021). Several are divided by their
    sum.
    """
    ordered, numbers = shares.sort(dim=-1, descending=True, stable=True)
    gates, chosen = ordered[..., :topk], numbers[..., :topk]
    if topk > 1:
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return gates, chosen


def balancing_loss(
    shares: torch.Tensor,
    chosen: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    per_sequence: bool,
) -> torch.Tensor:
    """``E * sum(f * P)``: 1 if ``E`` experts have equal loads, E if one has all.

    ``P`` is the mean of the probabilities ``[s, b, E]`` and ``f`` the share of the choices (Fedus
    et al. 2021, eq. 4 to 6), over all sequences of the group's ranks or over each. The choices of
    all ranks count together, ``P`` is local, and the mean over the ranks is the loss. One
    all-reduce.
    """
    picked = torch.zeros_like(shares).scatter_(-1, chosen, 1.0).sum(dim=0)
    mean = shares.mean(dim=0)
    if not per_sequence:
        picked, mean = picked.sum(dim=0), mean.mean(dim=0)
    if get_pg_size(group) > 1:
        dist.all_reduce(picked, group=group)
    load = picked / picked.sum(dim=-1, keepdim=True)
    return shares.shape[-1] * (load * mean).sum(dim=-1).mean()


class _WithGradientOf(torch.autograd.Function):
    """Returns the tensor. Backward passes its gradient, and 1 for the loss.

    ``noted`` is called in backward, so recomputation does not call it twice.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, noted: Callable[[], None]
    ) -> torch.Tensor:
        ctx.of_loss, ctx.noted = torch.ones_like(loss), noted
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.noted()
        return gradient, ctx.of_loss, None
