"""Training steps over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcore.modules import get_model_config, unwrap_model
from mcore.tensor import divide
from pretrain.model.deferred import DeferredWeightGradient
from pretrain.model.gpt import GPT
from pretrain.model.stages import chunks_of
from pretrain.optim.main_weights import MainWeightOptimizer
from pretrain.run.pipeline import Pipeline
from pretrain.run.steps import Steps
from pretrain.windows import Batch


class PipelineSteps(Steps):
    """Passes micro-batches from stage to stage. All ranks read all batches, the last has the loss.

    With ``--defer-embedding-wgrad`` the last stage computes the weight gradient of its head after
    its last backward, while the other stages are still busy.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chunks = chunks_of(self.model)
        self.pipeline = Pipeline(
            self.groups, chunks=len(self.chunks), device=self.device,
            timeout_s=self.settings.timeout_s,
        )  # fmt: skip
        self.head: GPT | None = None
        last = unwrap_model(self.chunks)[-1]
        if self.settings.defer_embedding_wgrad and last.stage.is_last:
            self.head = last
            last.deferred = DeferredWeightGradient(get_model_config(last), self.groups.tp)

    def _forward_and_backward(self, step: int) -> torch.Tensor:
        def batch_of(number: int) -> Batch:
            with self.ranges.data():
                return self._read_training_batch(step, number)

        work = _Work(self, batch_of)
        message = self._make_message(self.settings.rows_per_forward)
        self.pipeline.train(work, self.settings.num_microbatches, message)
        if self.head is not None and self.head.deferred is not None:
            weight: Any = self.head.logit_weight
            if isinstance(self.optimizer, MainWeightOptimizer):
                weight.main_grad = self.optimizer.sum_of(weight)
            self.head.deferred.drain(weight)
        return work.loss_sum

    def _sum_validation_losses(self) -> torch.Tensor:
        work = _Work(self, self._read_validation_batch)
        message = self._make_message(self.rows_per_rank)
        self.pipeline.evaluate(work, self.settings.eval_batches, message)
        return work.loss_sum

    def _make_message(self, rows: int) -> torch.Tensor:
        """A meta tensor with shape and dtype of the hidden states between two stages."""
        settings = self.settings
        length = divide(settings.seq_length, settings.cp)
        if settings.sequence_parallel:
            length = divide(length, settings.tp)
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        return torch.empty(length, rows, settings.hidden_size, dtype=dtype, device="meta")


class _Work:
    """The passes of one step, or of one validation."""

    def __init__(self, steps: PipelineSteps, batch_of: Callable[[int], Batch]) -> None:
        self.steps = steps
        self.batch_of = batch_of
        self.batches: dict[int, Batch] = {}  # batches that this rank still needs for a later chunk
        self.loss_sum = torch.zeros((), device=steps.device)

    def forward(self, chunk: int, batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states for the next stage, or the loss."""
        steps = self.steps
        drawn = self.batches.pop(batch, None) or self.batch_of(batch)
        if chunk + 1 < len(steps.chunks):
            self.batches[batch] = drawn
        with steps.ranges.forward():
            output: torch.Tensor
            output = steps.chunks[chunk](
                drawn["tokens"], drawn["position_ids"], hidden, cu_seqlens=drawn.get("cu_seqlens")
            )
            if steps.pipeline.is_last(chunk):
                output = steps._average_loss(output, drawn)
                self.loss_sum += output.detach()
        return output

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add the gradients of one chunk to those of earlier micro-batches."""
        with self.steps.ranges.backward():
            torch.autograd.backward(output, gradient)
        self.steps.optimizer.accumulate_gradients(is_whole=chunk == 0)
