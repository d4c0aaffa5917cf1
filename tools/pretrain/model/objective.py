"""The objective of the model: labels, loss, names and units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore.parallel import vocab_parallel_cross_entropy
from pretrain.settings import Settings

Batch = dict[str, torch.Tensor]
_LONGEST_COLUMN = 80


@dataclass(frozen=True)
class Objective:
    """An objective: its labels, losses and names.

    ``with_labels`` adds labels of whole sequences to a batch. ``losses`` returns the loss of each
    token ``[s, b]``, equal on all tp ranks. ``digits`` is the number of decimals shown.
    """

    loss_name: str
    unit: str
    digits: int
    description: str
    is_likelihood: bool
    with_labels: Callable[[Batch], Batch]
    losses: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup | None], torch.Tensor]

    @property
    def validation_name(self) -> str:
        """The name of the validation loss in logs."""
        return f"{self.loss_name} validation"


def objective_of(settings: Settings) -> Objective:
    """The objective of the settings."""
    if settings.value_head:
        return _COLUMN
    losses = functools.partial(_compute_token_losses, vocabulary_size=settings.vocabulary_size)
    kind = "token" if settings.tokenizer_digest else "byte"
    return Objective(
        loss_name="lm loss", unit=f"nats per {kind}", digits=3, description=f"the next {kind}",
        is_likelihood=True, with_labels=lambda batch: batch, losses=losses,
    )  # fmt: skip


def _add_columns(batch: Batch) -> Batch:
    columns = line_columns(batch["tokens"], batch["position_ids"])
    return {**batch, "labels": columns}


def _compute_squared_errors(
    values: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    return (values[..., 0] - labels).square()


def _compute_token_losses(
    logits: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup | None, *,
    vocabulary_size: int,
) -> torch.Tensor:  # fmt: skip
    return vocab_parallel_cross_entropy(
        logits, labels, tp_group=tp_group, vocab_size=vocabulary_size
    )


def line_columns(tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Bytes since the last line break divided by 80, from 0 (a line break) to 1: ``[b, s]``.

    The text before a sequence or document counts as a line break.
    """
    places = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
    breaks = torch.where(tokens == ord("\n"), places, 0)
    columns = torch.minimum(places - breaks.cummax(dim=-1).values, position_ids + 1)
    return (columns / _LONGEST_COLUMN).clamp(max=1.0)


_COLUMN = Objective(
    loss_name="value loss",
    unit="mean squared error",
    digits=5,
    description="value head: the column of each byte in its line, "
    f"1 for {_LONGEST_COLUMN} and more",
    is_likelihood=False,
    with_labels=_add_columns,
    losses=_compute_squared_errors,
)
