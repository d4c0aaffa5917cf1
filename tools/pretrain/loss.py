"""Cross entropy of logits whose vocabulary is split over the tp group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcore.parallel.groups import get_pg_rank, get_pg_size
from mcore.parallel.regions import reduce_from_tensor_model_parallel_region
from pretrain.corpus import VOCABULARY_SIZE


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Nats per byte of ``[s, b, vocabulary / tp]`` logits against ``[s, b]`` labels: ``[s, b]``.

    Two all-reduces over the tp group (the maximum; sum of exponentials and label logit together),
    none of them in backward. All tp ranks get the same result. Rows of the vocabulary that only
    fill up the last rank are left out.
    """
    columns = logits.shape[-1]
    first = get_pg_rank(tp_group) * columns
    filler = torch.arange(first, first + columns, device=logits.device) >= VOCABULARY_SIZE
    logits = logits.masked_fill(filler, float("-inf"))
    largest = logits.detach().amax(dim=-1)
    if get_pg_size(tp_group) > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    shifted = logits - largest[..., None]
    local = labels - first
    elsewhere = (local < 0) | (local >= columns)
    chosen = shifted.gather(-1, local.masked_fill(elsewhere, 0)[..., None])[..., 0]
    parts = torch.stack((shifted.exp().sum(dim=-1), chosen.masked_fill(elsewhere, 0.0)))
    exponentials, chosen = reduce_from_tensor_model_parallel_region(parts, tp_group)
    losses: torch.Tensor = exponentials.log() - chosen
    return losses
