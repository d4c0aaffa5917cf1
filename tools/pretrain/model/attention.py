"""Causal self-attention with heads split over tp and the sequence split over cp."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mcore.modules import MegatronModule
from mcore.parallel import (
    ProcessGroups,
    cp_zigzag_index,
    gather_from_sequence_parallel_region,
    get_pg_size,
)
from mcore.tensor import divide
from pretrain.model.configuration import ModelConfig
from pretrain.model.randomness import ParameterInit, inner_init, output_init, stream_for
from pretrain.model.rotary import split_rotated
from pretrain.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pretrain.packing import copy_without_wait


def causal_mask(
    positions: torch.Tensor, cp_group: torch.distributed.ProcessGroup | None
) -> torch.Tensor | None:
    """The causal mask ``[s / cp, s]`` of local queries, or None if cp is 1.

    Keys are in the order of the cp ranks, two chunks of the sequence each, so the mask compares
    true positions.
    """
    cp_size = get_pg_size(cp_group)
    if cp_size == 1:
        return None
    seq_length = positions.numel() * cp_size
    keys = torch.cat([cp_zigzag_index(seq_length, cp_size, rank) for rank in range(cp_size)])
    return positions[:, None] >= copy_without_wait(keys, positions.device)[None, :]


class SelfAttention(MegatronModule):
    """Multi-head causal attention. Its column-parallel input projection has whole heads."""

    def __init__(
        self, config: ModelConfig, init: ParameterInit, name: str, groups: ProcessGroups
    ) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.head_size = divide(hidden, config.num_attention_heads)
        self.cp_group = groups.cp
        self.dropout = config.dropout
        self.qkv = ColumnParallelLinear(
            config, init, f"{name}.qkv", (hidden, 3 * hidden), weight_init=inner_init(config)
        )
        self.projection = RowParallelLinear(
            config, init, f"{name}.projection", (hidden, hidden), weight_init=output_init(config)
        )

    def forward(
        self, hidden: torch.Tensor, rotary: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """``[s / cp, b, h]`` to the same. Gathers keys and values over the cp group."""
        qkv = self.qkv(hidden)
        sequence, batch, _ = qkv.shape
        query, key, value = split_rotated(qkv.view(sequence, batch, -1, 3 * self.head_size), rotary)
        if get_pg_size(self.cp_group) > 1:
            key_value = torch.cat((key, value), dim=-1).permute(2, 0, 1, 3).contiguous()
            key_value = gather_from_sequence_parallel_region(key_value, group=self.cp_group)
            key, value = key_value.permute(1, 2, 0, 3).chunk(2, dim=-1)
        context = self._attend(query, key, value, mask)
        projected: torch.Tensor = self.projection(
            context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
        )
        return projected

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        with stream_for(differs_over_tp=dropout > 0):  # heads differ over tp
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            )
