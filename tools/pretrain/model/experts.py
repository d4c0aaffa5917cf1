"""A feed-forward of experts over the ep ranks. Tokens are sent to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from mcore.modules import MegatronModule
from mcore.parallel import ProcessGroups, all_to_all, get_pg_rank, get_pg_size
from mcore.tensor import divide
from pretrain.model.configuration import ModelConfig
from pretrain.model.randomness import ParameterInit, inner_init, output_init
from pretrain.model.router import Router
from pretrain.model.tensor_parallel import (
    Offsets,
    TensorParallelModule,
    enter_split_layers,
    leave_split_layers,
)


class Expert(TensorParallelModule):
    """Two matrices with GELU between them, split over the tp group by column and by row."""

    shard_axes: ClassVar = {"widen": 0, "narrow": 1}

    def __init__(
        self, config: ModelConfig, init: ParameterInit, name: str, groups: ProcessGroups
    ) -> None:
        super().__init__(config, init)
        self.replicas = groups.expt_dp
        hidden, inner = config.hidden_size, config.ffn_hidden_size or 4 * config.hidden_size
        self.widen = init.shard(f"{name}.widen", (inner, hidden), inner_init(config), axis=0)
        self.narrow = init.shard(f"{name}.narrow", (hidden, inner), output_init(config), axis=1)
        mark_expert([self.widen, self.narrow])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, h]`` to this tp rank's part of the sum, ``[n, h]``."""
        return F.linear(F.gelu(F.linear(rows, self.widen)), self.narrow)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe each slice by its place in the expert's matrix."""
        of_experts = {**(metadata or {}), "dp_cp_group": self.replicas}
        return super().sharded_state_dict(prefix, sharded_offsets, of_experts)


class Experts(MegatronModule):
    """The experts of this ep rank, by their numbers in the layer."""

    def __init__(
        self, config: ModelConfig, init: ParameterInit, name: str, groups: ProcessGroups
    ) -> None:
        super().__init__(config)
        count = divide(config.num_moe_experts or 1, get_pg_size(groups.ep))
        first = get_pg_rank(groups.ep) * count
        self.own = torch.nn.ModuleDict(
            {
                str(number): Expert(config, init, f"{name}.{number}", groups)
                for number in range(first, first + count)
            }
        )

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """``[n, h]`` to the same. ``counts`` is the number of rows per expert, possibly 0."""
        parts = zip(self.own.values(), torch.split(rows, counts), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


class ExpertFeedForward(MegatronModule):
    """A router and its experts. No token is dropped."""

    def __init__(
        self, config: ModelConfig, init: ParameterInit, name: str, groups: ProcessGroups, *,
        number: int,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.groups = groups
        self.router = Router(config, init, f"{name}.router", groups, number=number)
        self.experts = Experts(config, init, f"{name}.experts", groups)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]`` to the same. Two all-to-alls over ``ep``, and one of their sizes."""
        split = self.config.sequence_parallel
        hidden = enter_split_layers(hidden, self.groups.tp, sequence_parallel=split)
        gates, chosen = self.router(hidden)
        outputs = self._run_chosen(hidden.flatten(0, 1), chosen.flatten(0, 1))
        weights = gates.to(outputs.dtype).view(*outputs.shape[:2], 1)
        summed = (outputs * weights).sum(dim=1).view_as(hidden)
        return leave_split_layers(summed, self.groups.tp, sequence_parallel=split)

    def _run_chosen(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Outputs ``[n, topk, h]`` of the chosen experts ``[n, topk]`` for the tokens ``[n, h]``.

        Rows are sent in the order of experts. They arrive in the order of ranks and are sorted by
        expert.
        """
        ep_group, ep_size = self.groups.ep, get_pg_size(self.groups.ep)
        copies = tokens[:, None].expand(*chosen.shape, -1).flatten(0, 1)
        to_expert = chosen.flatten().argsort(stable=True)
        going = tokens.new_zeros(self.router.num_experts, dtype=torch.long)  # bincount would wait
        going.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        coming = all_to_all(going, ep_group).view(ep_size, -1)
        # The host needs the sizes of messages and parts: it waits for the device only here.
        sums = going.view(ep_size, -1).sum(dim=1), coming.sum(dim=1), coming.sum(dim=0)
        sizes = torch.cat(sums).tolist()
        sent, received, counts = sizes[:ep_size], sizes[ep_size:][:ep_size], sizes[2 * ep_size :]
        arrived = all_to_all(
            copies[to_expert], ep_group, output_split_sizes=received, input_split_sizes=sent
        )
        numbers = torch.arange(coming.shape[1], device=tokens.device).repeat(ep_size)
        numbers = numbers.repeat_interleave(coming.flatten(), output_size=sum(received))
        by_expert = numbers.argsort(stable=True)
        results = self.experts(arrived[by_expert], counts)
        back = all_to_all(
            results[by_expert.argsort()], ep_group, output_split_sizes=sent,
            input_split_sizes=received,
        )  # fmt: skip
        return back[to_expert.argsort()].view(*chosen.shape, -1)


def mark_expert(parameters: Iterable[torch.Tensor]) -> None:
    """Mark parameters as replicated over ``expt_dp``, with the attribute that the packages read."""
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return getattr(parameter, "allreduce", True) is False
