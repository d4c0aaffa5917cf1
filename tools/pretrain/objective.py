"""What the model learns: the target of each byte, the loss, and how it is named and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pretrain.line_column import LONGEST_COLUMN, line_columns
from pretrain.loss import vocab_parallel_cross_entropy
from pretrain.settings import Settings

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """One thing to learn.

    Args:
        loss_name: of the training loss in logs.
        unit: of the loss.
        digits: after the point, where the loss is shown to a reader.
        description: of what is learned, in a few words.
        is_likelihood: whether the exponential of the loss is a perplexity.
        with_labels: puts ``labels`` of whole sequences into a batch.
        losses: model output, labels ``[s, b]`` and tp group to the loss of each byte ``[s, b]``,
            equal on all tp ranks.
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
        """Of the validation loss in logs."""
        return f"{self.loss_name} validation"


def objective_of(settings: Settings) -> Objective:
    """The objective that the settings ask for."""
    return _COLUMN if settings.value_head else _NEXT_BYTE


def _with_columns(batch: Batch) -> Batch:
    return {**batch, "labels": line_columns(batch["tokens"])}


def _squared_errors(
    values: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    return (values[..., 0] - labels).square()


_NEXT_BYTE = Objective(
    loss_name="lm loss",
    unit="nats per byte",
    digits=3,
    description="the next byte",
    is_likelihood=True,
    with_labels=lambda batch: batch,
    losses=vocab_parallel_cross_entropy,
)
_COLUMN = Objective(
    loss_name="value loss",
    unit="mean squared error",
    digits=5,
    description=f"value head: the column of each byte in its line, 1 for {LONGEST_COLUMN} and more",
    is_likelihood=False,
    with_labels=_with_columns,
    losses=_squared_errors,
)
