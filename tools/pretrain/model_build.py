"""Builds this rank's part of the model, and the optimizer over it, from the settings."""

from __future__ import annotations

import torch

from mcore.modules import Float16Module, MegatronModule, TransformerConfig
from mcore.parallel import ProcessGroups
from pretrain.adamw import TrainingOptimizer
from pretrain.fully_sharded import FullyShardedOptimizer, shard_model, sharding_index
from pretrain.main_weight_optimizer import MainWeightOptimizer
from pretrain.model import GPT
from pretrain.parameter_init import ParameterInit
from pretrain.settings import Settings
from pretrain.value_model import put_value_head


def transformer_config(settings: Settings) -> TransformerConfig:
    """The configuration that the model's modules read."""
    return TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        tensor_model_parallel_size=settings.tp,
        context_parallel_size=settings.cp,
        sequence_parallel=settings.sequence_parallel,
        cuda_graph_impl=settings.cuda_graph,
        bf16=settings.bf16,
        params_dtype=torch.bfloat16 if settings.bf16 else torch.float32,
    )


def build_model(
    settings: Settings, config: TransformerConfig, groups: ProcessGroups, device: torch.device
) -> MegatronModule:
    """The GPT on ``device``, in bfloat16 behind a ``Float16Module`` where asked for.

    Collective on the tp group.
    """
    init = ParameterInit(settings.seed, device, groups.tp)
    model = GPT(config, init, groups, untied=settings.untied, dropout=settings.dropout)
    if settings.value_head:
        put_value_head(model, config, init)
    # FSDP casts by itself, from fp32 shards.
    return Float16Module(config, model) if settings.bf16 and not settings.fsdp else model


def build_optimizer(
    settings: Settings, model: MegatronModule, groups: ProcessGroups
) -> TrainingOptimizer:
    """The optimizer of the model; with ``--fsdp`` the model is sharded on the way.

    Collective on the world group.
    """
    if not settings.fsdp:
        return MainWeightOptimizer(model, groups, weight_decay=settings.weight_decay)
    index = sharding_index(groups, settings.hsdp_outer)
    shard_model(model, index, bf16=settings.bf16)
    return FullyShardedOptimizer(model, groups, index, weight_decay=settings.weight_decay)
