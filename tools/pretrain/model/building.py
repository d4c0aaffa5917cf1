"""The model and its optimizer, built from the settings of a run."""

from __future__ import annotations

import torch

from mcore.modules import Float16Module, MegatronModule, freeze_moe_router
from mcore.parallel import ProcessGroups
from pretrain.model.configuration import ModelConfig
from pretrain.model.gpt import GPT, put_value_head
from pretrain.model.randomness import ParameterInit
from pretrain.model.stages import ModelChunks, stages_of_rank
from pretrain.optim.adamw import TrainingOptimizer
from pretrain.optim.main_weights import MainWeightOptimizer
from pretrain.settings import Settings


def build_model(
    settings: Settings, config: ModelConfig, groups: ProcessGroups, device: torch.device
) -> MegatronModule:
    """The GPT, or this rank's stages of it, on ``device``, in bfloat16 if requested.

    Collective on the tp group.
    """
    init = ParameterInit(settings.seed, device, groups.tp)
    stages = stages_of_rank(
        settings.num_layers, rank=groups.rank("pp"), ranks=settings.pp, chunks=settings.vpp
    )
    models = [GPT(config, init, groups, stage) for stage in stages]
    if settings.value_head:
        put_value_head(models, config, init)
    chunks: list[MegatronModule] = list(models)
    if settings.freeze_router:
        freeze_moe_router(chunks)
    if settings.bf16 and not settings.fsdp:  # fully_shard casts from fp32 shards
        chunks = [
            Float16Module(config, model, vp_stage=number if settings.vpp > 1 else None)
            for number, model in enumerate(models)
        ]
    return chunks[0] if len(chunks) == 1 else ModelChunks(config, chunks)


def build_optimizer(
    settings: Settings, model: MegatronModule, groups: ProcessGroups
) -> TrainingOptimizer:
    """The optimizer of the model. With ``--fsdp`` shards the model. Collective on the world."""
    if not settings.fsdp:
        return MainWeightOptimizer(model, groups, settings)
    # Imports torch's FSDP, which takes a second.
    from pretrain.optim.fully_sharded import FullyShardedOptimizer, shard_model, sharding_index

    index = sharding_index(groups, settings.hsdp_outer)
    shard_model(model, index, bf16=settings.bf16)
    return FullyShardedOptimizer(model, groups, index, settings)
