"""The weight gradient of the output head, computed later, while the last stage idles."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mcore.parallel import drain_embedding_wgrad_compute


class DeferredWeightGradient:
    """Stores inputs and output gradients of one weight until :meth:`drain` computes its gradient.

    The sum is added to ``weight.main_grad``. ``weight.grad`` stays empty.
    """

    def __init__(self, config: object, tp_group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.tp_group = tp_group
        self.inputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor, *, kept: torch.Tensor
    ) -> torch.Tensor:
        """``[s, b, h]`` to ``[s, b, v]``. ``kept`` is ``hidden`` or this rank's slice of it."""
        logits: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            hidden, weight, kept.detach(), self
        )
        return logits

    def drain(self, weight: torch.Tensor) -> None:
        """Add all kept gradients to ``weight.main_grad``.

        With sequence parallelism collective on the tp group, which gathers the kept slices.
        """
        drain_embedding_wgrad_compute(
            self.config, self.inputs, self.gradients, weight, self.tp_group
        )


class _Linear(torch.autograd.Function):
    """A linear layer with a backward that stores the inputs of the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        kept: torch.Tensor,
        deferred: DeferredWeightGradient,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, kept)
        ctx.deferred = deferred
        return F.linear(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight, kept = ctx.saved_tensors
        ctx.deferred.inputs.append(kept)
        ctx.deferred.gradients.append(gradient)
        return gradient @ weight, None, None, None
