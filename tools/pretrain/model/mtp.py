"""Multi-token prediction: one more block for the token after the next."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore.modules import MegatronModule
from mcore.observe import get_mtp_metrics_tracker
from mcore.parallel import ProcessGroups, get_pg_rank, get_pg_size
from pretrain.model.configuration import ModelConfig
from pretrain.model.norm import LayerNorm
from pretrain.model.randomness import ParameterInit, inner_init
from pretrain.model.tensor_parallel import mark_partial_gradients

Batch = dict[str, torch.Tensor]
Losses = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup | None], torch.Tensor]
AHEAD_LABELS, AHEAD_MASK = "ahead_labels", "ahead_mask"


class PredictionAhead(MegatronModule):
    """Hidden states of one more depth, from the model's hidden states and the embedded next tokens.

    DeepSeek-V3 (2024), section 2.2: both are normalized, concatenated and projected. A transformer
    layer follows. Embedding and head are shared with the model.
    """

    def __init__(self, config: ModelConfig, init: ParameterInit, layer: torch.nn.Module) -> None:
        super().__init__(config)
        hidden, device = config.hidden_size, init.device
        self.hidden_norm = LayerNorm(hidden, device=device)
        self.next_norm = LayerNorm(hidden, device=device)
        shape = (hidden, 2 * hidden)
        self.projection = init.shard("mtp.projection", shape, inner_init(config), axis=None)
        self.final_norm = LayerNorm(hidden, device=device)
        if config.sequence_parallel:
            mark_partial_gradients(self.parameters())
        self.layer = layer

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        run: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``[s, b, h]`` each to ``[s, b, h]``. ``run`` runs the layer like the other layers."""
        joined = torch.cat((self.hidden_norm(hidden), self.next_norm(embedded)), dim=-1)
        ahead: torch.Tensor = self.final_norm(run(self.layer, F.linear(joined, self.projection)))
        return ahead


def with_labels_ahead(batch: Batch) -> Batch:
    """Add the labels one token later for whole sequences. The last position has none."""
    labels, mask = batch["labels"], batch["loss_mask"]
    nothing = torch.zeros_like(mask[:, :1])
    ahead = torch.cat((labels[:, 1:], labels[:, -1:]), dim=1)
    return {**batch, AHEAD_LABELS: ahead, AHEAD_MASK: torch.cat((mask[:, 1:], nothing), dim=1)}


def loss_ahead(
    outputs: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    losses_of: Losses,
    groups: ProcessGroups,
    vocabulary_size: int,
) -> torch.Tensor:
    """Loss of the second of two outputs ``[s / cp, b, v / tp]``, to be averaged over the ranks.

    Records the loss and, for the acceptance rates, the number of predictions that agree with the
    model at the next position. One all-reduce over ``dp_cp``, an all-gather over ``tp`` and ``cp``.
    """
    ahead = outputs[1]
    mask = batch[AHEAD_MASK].transpose(0, 1)
    losses = losses_of(ahead, batch[AHEAD_LABELS].transpose(0, 1), groups.tp) * mask
    counted = mask.sum()
    if get_pg_size(groups.dp_cp) > 1:
        dist.all_reduce(counted, group=groups.dp_cp)
    loss = losses.sum() / (counted / get_pg_size(groups.dp_cp))
    if torch.is_grad_enabled():
        accepted = _count_accepted(outputs, batch, groups, vocabulary_size)
        get_mtp_metrics_tracker().record(
            loss, 1, 1, accepted=accepted, predicted=mask.sum(), avg_group=groups.dp_cp
        )
    return loss


@torch.no_grad()
def _count_accepted(
    outputs: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    groups: ProcessGroups,
    vocabulary_size: int,
) -> torch.Tensor:
    """The number of predictions that agree with the model's choice at the next position."""
    now, ahead = (likeliest(logits, groups.tp, vocabulary_size) for logits in outputs)
    positions = batch["position_ids"][0]
    ranks = _gather(torch.cat((positions[:, None], now), dim=1), groups.cp)
    every = torch.cat(ranks)
    ordered = every[every[:, 0].argsort(), 1:]
    following = (positions + 1).clamp(max=len(ordered) - 1)
    accepted: torch.Tensor = ((ordered[following] == ahead) * batch[AHEAD_MASK].T).sum()
    return accepted


def likeliest(
    logits: torch.Tensor, tp_group: dist.ProcessGroup | None, vocabulary_size: int
) -> torch.Tensor:
    """Index of the largest logit of ``[..., v / tp]`` without padding, equal on all tp ranks."""
    start = get_pg_rank(tp_group) * logits.shape[-1]
    best, number = logits[..., : max(1, vocabulary_size - start)].max(dim=-1)
    if start >= vocabulary_size:
        best = torch.full_like(best, -math.inf)
    values, numbers = _gather(best, tp_group), _gather(number + start, tp_group)
    first = torch.stack(values).max(dim=0).indices
    chosen: torch.Tensor = torch.stack(numbers).gather(0, first[None])[0]
    return chosen


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if get_pg_size(group) == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(get_pg_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
