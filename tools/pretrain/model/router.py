"""The router of a layer of experts: which take a token, how much each counts, and its losses."""

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
    """A linear from hidden states to experts, in fp32, of which the ``topk`` likeliest are taken.

    Its losses come in through the gates: their gradient is added in backward, where that of the
    model's loss passes, so that no path leads from here to the last layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        init: ParameterInit,
        name: str,
        groups: ProcessGroups,
        *,
        number: int,
    ) -> None:
        super().__init__(config)
        self.config: ModelConfig = config
        self.groups = groups
        self.number = number
        self.num_experts = config.num_moe_experts or 1
        shape = (self.num_experts, config.hidden_size)
        self.weight = init.replica(f"{name}.weight", shape, inner_init(config))
        if get_pg_size(groups.tp) > 1:  # each tp rank sees its part of the experts' outputs
            mark_partial_gradients([self.weight])

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[s, b, h]`` to gates and numbers of the experts of each token, ``[s, b, topk]``.

        In training one all-reduce of counts over ``dp_cp``, or over ``cp`` where each sequence is
        balanced by itself.
        """
        logits = F.linear(hidden.float(), self.weight.float())
        shares = logits.softmax(dim=-1)
        gates, chosen = choose(shares, self.config.moe_router_topk)
        if self.training and torch.is_grad_enabled():
            gates = self._with_losses(gates, logits, shares, chosen)
        return gates, chosen

    def _with_losses(
        self,
        gates: torch.Tensor,
        logits: torch.Tensor,
        shares: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        per_sequence = "seq_aux_loss" in config.moe_router_load_balancing_type
        group = self.groups.cp if per_sequence else self.groups.dp_cp
        balance = balancing_loss(shares, chosen, group, per_sequence=per_sequence)
        size = logits.logsumexp(dim=-1).square().mean()
        name = "seq_load_balancing_loss" if per_sequence else "load_balancing_loss"
        values = {name: balance.detach(), "z_loss": size.detach()}
        loss = config.moe_aux_loss_coeff * balance + (config.moe_z_loss_coeff or 0.0) * size
        # Gradients are summed over the tp ranks, which all have the same loss.
        loss = loss / get_pg_size(self.groups.tp)
        noted = functools.partial(self._record, values)
        with_loss: torch.Tensor = _WithGradientOf.apply(  # type: ignore[no-untyped-call]
            gates, loss, noted
        )
        return with_loss

    def _record(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            get_moe_metrics_tracker().record(
                name,
                value,
                self.number + 1,
                self.config.num_blocks,
                avg_group=self.groups.dp_cp,
                needs_dp_avg=False,
            )


def choose(shares: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``topk`` largest of ``[..., experts]`` and their numbers; of equal ones the lower first.

    A single one counts with its share (Fedus et al. 2021); several are divided by their sum.
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
    """``E * sum(f * P)``: 1 where ``E`` experts have equal loads, E where one has all.

    ``P`` is the mean of the shares ``[s, b, E]`` and ``f`` the part of the choices (Fedus et al.
    2021, eq. 4 to 6), over all sequences of the group's ranks or each. The mean over these ranks
    is the loss: they count together, and each has its own mean. One all-reduce.
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
    """Forward the tensor; backward its gradient, and 1 for the loss.

    ``noted`` is called in backward, which is run once where layers are recomputed, too.
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
