"""The stages of a pipeline: their parts of the model, and the chunks of one rank."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore.modules import MegatronModule, TransformerConfig, param_is_not_shared, unwrap_model
from mcore.observe import log_on_each_pipeline_stage
from mcore.parallel import ProcessGroups, copy_tensor_model_parallel_attributes, get_pg_size
from mcore.parallel.checkpoint import ShardedTensor
from mcore.tensor.param_flags import mark_param_shared
from pretrain.model.experts import is_expert, mark_expert
from pretrain.model.tensor_parallel import has_partial_gradient, mark_partial_gradients

_EMBEDDING = "shared_embedding"
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Consecutive layers, with the embedding before the first and the head after the last."""

    layers: range
    is_first: bool = True
    is_last: bool = True

    @property
    def description(self) -> str:
        """The layers and other parts of the stage."""
        first, last = self.layers[0], self.layers[-1]
        parts = [f"layer {first}" if first == last else f"layers {first} to {last}"]
        return ", ".join(
            ["embedding"] * self.is_first + parts + ["final norm and head"] * self.is_last
        )


def stages_of_rank(num_layers: int, *, rank: int, ranks: int, chunks: int) -> list[Stage]:
    """The stages of one rank: every ``ranks``-th of ``ranks * chunks`` equal stages."""
    count, last = num_layers // (ranks * chunks), ranks * chunks - 1
    return [
        Stage(range(place * count, (place + 1) * count), place == 0, place == last)
        for place in range(rank, last + 1, ranks)
    ]


class ModelChunks(MegatronModule):
    """The stages of a rank that has several, in the order of the model."""

    def __init__(self, config: TransformerConfig, chunks: Sequence[MegatronModule]) -> None:
        super().__init__(config)
        self.chunks = torch.nn.ModuleList(chunks)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The entries of all chunks. Their names do not overlap."""
        merged: dict[str, Any] = {}
        for chunk in chunks_of(self):
            merged.update(chunk.sharded_state_dict(prefix, *args, **kwargs))
        return merged


def chunks_of(model: torch.nn.Module) -> list[Any]:
    """The chunks of a rank's model as a list, with one entry for a whole model."""
    return list(model.chunks) if isinstance(model, ModelChunks) else [model]


def mark_shared_embedding(weight: torch.Tensor, *, is_copy: bool) -> None:
    """Mark a weight as shared by the first and the last stage, and as the copy or not."""
    setattr(weight, _EMBEDDING, True)
    mark_param_shared(weight, is_copy)


def is_shared_embedding(weight: torch.Tensor) -> bool:
    """Whether the weight is shared by the first and the last stage."""
    return bool(getattr(weight, _EMBEDDING, False))


def copy_marks(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all marks of a parameter to its replacement."""
    copy_tensor_model_parallel_attributes(target, source)
    if is_shared_embedding(source):
        mark_shared_embedding(target, is_copy=not param_is_not_shared(source))
    if has_partial_gradient(source):
        mark_partial_gradients([target])
    if is_expert(source):
        mark_expert([target])


def as_replica(entry: ShardedTensor) -> ShardedTensor:
    """The entry of a sharded state for loading only: another rank saves it."""
    numbers = entry.replica_id if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
    return dataclasses.replace(entry, replica_id=(numbers[0] + 1, *numbers[1:]))


def count_parameters(model: torch.nn.Module, groups: ProcessGroups) -> int:
    """The approximate number of parameters of all stages. One all-reduce over the pp group."""
    own = sum(
        param.numel() * (get_pg_size(groups.ep) if is_expert(param) else 1)
        for param in model.parameters()
        if param_is_not_shared(param)
    )
    if get_pg_size(groups.pp) == 1:
        return own * get_pg_size(groups.tp)
    device = next(model.parameters()).device
    total = torch.tensor(own * get_pg_size(groups.tp), device=device)
    dist.all_reduce(total, group=groups.pp)
    return int(total.item())


def log_stages(model: torch.nn.Module, groups: ProcessGroups) -> None:
    """Print the content of each stage of the pipeline once. No communication."""
    handler = logging.StreamHandler(sys.stdout)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    stages = [chunk.stage for chunk in unwrap_model(chunks_of(model))]
    log_on_each_pipeline_stage(
        logger, logging.INFO, "stage %d of %d     %s, about %.2f M parameters",
        groups.rank("pp") + 1, groups.size("pp"), "; ".join(stage.description for stage in stages),
        groups.size("tp") * sum(param.numel() for param in model.parameters()) / 1e6,
        tp_group=groups.tp, dp_cp_group=groups.dp_cp,
    )  # fmt: skip
    logger.removeHandler(handler)
