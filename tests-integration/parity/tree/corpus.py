"""The data of ``pretrain_gpt.py``, and the forward pass on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank, get_pg_rank

ROWS, LENGTH, VOCABULARY = 2, 16, 64


class Corpus:
    """Random tokens, others on each data-parallel rank."""

    def __init__(self) -> None:
        rank = get_pg_rank(parallel_state.get_data_parallel_group())
        self.draw = torch.Generator().manual_seed(5 + rank)
        self.places = torch.arange(LENGTH).expand(ROWS, LENGTH)
        self.future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def forward(self, _: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        text = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=self.draw)
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": self.places}
        batch = get_batch_on_this_cp_rank(batch)
        losses = model(batch["tokens"], batch["position_ids"], self.future, labels=batch["labels"])
        return losses, average


def average(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}
