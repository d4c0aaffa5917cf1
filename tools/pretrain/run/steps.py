"""The work of one rank: an optimizer step over its rows, and the validation loss."""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.distributed as dist

from mcore.modules import MegatronModule
from mcore.parallel import ProcessGroups, get_pg_size
from pretrain.corpus import Corpus
from pretrain.model.mtp import loss_ahead, with_labels_ahead
from pretrain.model.objective import objective_of
from pretrain.optim.adamw import TrainingOptimizer
from pretrain.packing import copy_without_wait, part_of_batch
from pretrain.run.schedule import learning_rate_at
from pretrain.settings import Settings
from pretrain.watch.straggler import StepRanges
from pretrain.windows import Batch


class HostCopy:
    """A copy of a small tensor to the host, which waits for it only in :meth:`read`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._event = tensor, None
        if tensor.device.type != "cpu":
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy = host.copy_(tensor, non_blocking=True)
            self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def read(self) -> torch.Tensor:
        """Return the copy as soon as the device has made it."""
        # Not synchronize(), which may keep a core busy that other threads need.
        while self._event is not None and not self._event.query():
            time.sleep(1e-4)
        return self._copy


@dataclasses.dataclass(eq=False)
class Steps:
    """Reads batches, runs the model on them and updates it. All ranks call it together."""

    settings: Settings
    model: MegatronModule
    optimizer: TrainingOptimizer
    corpus: Corpus
    groups: ProcessGroups
    device: torch.device
    ranges: StepRanges

    def __post_init__(self) -> None:
        self._ahead: dict[tuple[int, int], Batch] = {}
        self.objective = objective_of(self.settings)
        self.rows_per_rank = self.settings.global_batch_size // self.settings.dp

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
        """Forward, backward and update of one step, without a wait of the host for the device.

        Returns the mean loss of the global batch before the update, the gradient norm, the learning
        rate, and whether the update was skipped because of non-finite gradients. The tensors are
        0-d and equal on all ranks.
        """
        settings = self.settings
        self.model.train()
        mean_loss = self.optimizer.reduce_gradients(self._forward_and_backward(step))
        self._share_over_stages(mean_loss)
        norm = self.optimizer.clip_gradients(settings.clip_grad)
        rate = learning_rate_at(settings, step)
        with self.ranges.optimizer():
            self.optimizer.step(rate, norm)
        if self.device.type != "cpu":  # the host prepares the next batches while the device works
            with self.ranges.data():
                places = [(step + 1, number) for number in range(settings.num_microbatches)]
                self._ahead = {place: self._read_training_batch(*place) for place in places}
        return mean_loss, norm, rate, norm.isfinite().logical_not()

    def _forward_and_backward(self, step: int) -> torch.Tensor:
        """Accumulate the gradients of all micro-batches of this rank. Returns the sum of losses."""
        loss_sum = torch.zeros((), device=self.device)
        for number in range(self.settings.num_microbatches):
            with self.ranges.data():
                batch = self._read_training_batch(step, number)
            with self.ranges.forward():
                loss = self._compute_loss(batch)
            with self.ranges.backward():
                torch.autograd.backward(loss)
            self.optimizer.accumulate_gradients()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the validation batches, equal on all ranks.

        One all-reduce over ``pp`` and one over ``dp_cp``.
        """
        self.model.eval()
        total = self._sum_validation_losses()
        self._share_over_stages(total)
        if get_pg_size(self.groups.dp_cp) > 1:
            dist.all_reduce(total, group=self.groups.dp_cp)
        return float(total.item()) / (self.settings.eval_batches * get_pg_size(self.groups.dp_cp))

    def _sum_validation_losses(self) -> torch.Tensor:
        """The sum of this rank's losses of the validation batches."""
        total = torch.zeros((), device=self.device)
        for number in range(self.settings.eval_batches):
            total += self._compute_loss(self._read_validation_batch(number))
        return total

    def _share_over_stages(self, loss: torch.Tensor) -> None:
        """Copy the loss of the last stage to all stages, in place. The others pass zero."""
        if get_pg_size(self.groups.pp) > 1:
            dist.all_reduce(loss, group=self.groups.pp)

    def _read_training_batch(self, step: int, number: int) -> Batch:
        if ahead := self._ahead.pop((step, number), None):
            return ahead
        count = self.settings.rows_per_forward
        rows = self._select_rows(number * count, count)
        return self._prepare_batch(self.corpus.training_batch(self.settings, rows, step))

    def _read_validation_batch(self, number: int) -> Batch:
        rows = self._select_rows(0, self.rows_per_rank)
        return self._prepare_batch(self.corpus.validation_batch(self.settings, rows, number))

    def _select_rows(self, first: int, count: int) -> slice:
        start = self.groups.rank("dp") * self.rows_per_rank + first
        return slice(start, start + count)

    def _prepare_batch(self, batch: Batch) -> Batch:
        """This rank's part of the sequences, on its device."""
        batch = self.objective.with_labels(batch)
        if self.settings.mtp:
            batch = with_labels_ahead(batch)
        local = part_of_batch(batch, self.groups.cp)
        return {
            # The host reads the borders of documents. The rest is copied while it goes on.
            name: tensor if name == "cu_seqlens" else copy_without_wait(tensor, self.device)
            for name, tensor in local.items()
        }

    def _compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        looks_ahead = self.settings.mtp > 0 and self.model.training
        output = self.model(
            batch["tokens"], batch["position_ids"],
            next_tokens=batch["labels"] if looks_ahead else None,
            cu_seqlens=batch.get("cu_seqlens"),
        )  # fmt: skip
        return self._average_loss(output, batch)

    def _average_loss(
        self, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """Mean over this rank's tokens. All ranks have equally many, so means may be averaged.

        With two outputs the result has the gradient of both losses and the value of the first.
        """
        logits = output[0] if isinstance(output, tuple) else output
        losses = self.objective.losses(logits, batch["labels"].transpose(0, 1), self.groups.tp)
        loss = (losses * batch["loss_mask"].transpose(0, 1)).mean()
        if not isinstance(output, tuple):
            return loss
        more = self.settings.mtp_loss * loss_ahead(
            output, batch, self.objective.losses, self.groups, self.settings.vocabulary_size
        )
        return loss + (more - more.detach())
