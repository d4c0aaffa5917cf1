"""The configuration of the job's model, with experts and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mcore.modules import TransformerConfig
from pretrain.settings import Settings

_BALANCING = {"batch": "aux_loss", "sequence": "seq_aux_loss"}


@dataclass
class ModelConfig(TransformerConfig):
    """A ``TransformerConfig`` with the job's options of a model, and those that metrics read."""

    vocabulary_size: int = 256
    untied: bool = False
    dropout: float = 0.0
    recompute: bool = False

    num_moe_experts: int | None = None
    moe_router_topk: int = 1
    moe_router_load_balancing_type: list[str] = field(default_factory=list)
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_per_layer_logging: bool = True
    mtp_num_layers: int | None = None

    @property
    def num_blocks(self) -> int:
        """The number of transformer layers, including multi-token prediction."""
        return self.num_layers + (self.mtp_num_layers or 0)


def transformer_config(settings: Settings) -> ModelConfig:
    """The configuration of the model's modules and the training log."""
    experts: dict[str, Any] = {}
    if settings.experts:
        experts = {
            "num_moe_experts": settings.experts,
            "moe_router_topk": settings.topk,
            "moe_router_load_balancing_type": [_BALANCING[settings.balance]],
            "moe_aux_loss_coeff": settings.balance_loss,
            "moe_z_loss_coeff": settings.z_loss,
        }
    return ModelConfig(
        num_layers=settings.num_layers, hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads, tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=settings.vpp if settings.vpp > 1 else None,
        context_parallel_size=settings.cp, sequence_parallel=settings.sequence_parallel,
        cuda_graph_impl=settings.cuda_graph, bf16=settings.bf16,
        params_dtype=torch.bfloat16 if settings.bf16 else torch.float32,
        mtp_num_layers=settings.mtp or None, vocabulary_size=settings.vocabulary_size,
        untied=settings.untied or settings.value_head, dropout=settings.dropout,
        recompute=settings.recompute, **experts,
    )  # fmt: skip
