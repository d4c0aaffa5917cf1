"""Metrics of multi-token prediction: a loss and acceptance rates for each depth."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mcore.observe.experts.moe_metrics import write_scalars
from mcore.observe.loss_totals import add_losses
from mcore.observe.sinks.scalars import read_scalars, widest_float
from mcore.parallel.groups import GroupLike, get_pg_size
from mcore.parallel.reductions import sum_over_group

_LOSS, _ACCEPTED, _PREDICTED = range(3)


class MTPMetricsTracker:
    """Sums losses and counts of multi-token prediction, and reports them over the ranks.

    Recording adds on the device and never waits. Only ranks that have recorded values, those of the
    last pipeline stage, take part in a report.

    Example:
        >>> tracker = MTPMetricsTracker()
        >>> tracker.record(torch.tensor(2.0), depth=1, num_depths=1, accepted=3, predicted=4)
        >>> totals = {}
        >>> tracker.report(loss_scale=1.0, iteration=1, total_loss_dict=totals)
        ''
        >>> totals
        {'mtp_1 loss': tensor([2.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        self._has_counts = False
        self._reduce_group: GroupLike | None = None
        self._avg_group: GroupLike | None = None
        # [loss, accepted, predicted] by depth. float64 keeps counts of tokens exact up to 2**53.
        self._pending: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None
        self._ever: torch.Tensor | None = None

    def record(
        self,
        loss: torch.Tensor,
        depth: int,
        num_depths: int,
        *,
        accepted: torch.Tensor | int | None = None,
        predicted: torch.Tensor | int | None = None,
        reduce_group: GroupLike | None = None,
        avg_group: GroupLike | None = None,
    ) -> None:
        """Add a microbatch of one depth to the current step. No communication, no wait.

        Args:
            loss: One element.
            depth: The distance of the predicted token, from 1.
            num_depths: Number of depths.
            accepted: Number of predictions that the main head accepted.
            predicted: Number of predictions.
            reduce_group: The report sums losses and counts over this group.
            avg_group: The report averages losses and sums counts over this group.

        Raises:
            ValueError: A depth outside 1..num_depths, a ``num_depths`` that differs from before,
                or one of the counts without the other.
        """
        if not 1 <= depth <= num_depths:
            raise ValueError(f"depth is {depth}: give 1 to {num_depths}")
        if (accepted is None) != (predicted is None):
            raise ValueError("give accepted and predicted, or neither")
        if self._pending is None:
            dtype = widest_float(loss.device)
            self._pending = torch.zeros(3, num_depths, dtype=dtype, device=loss.device)
            self._kept = torch.zeros_like(self._pending)
        if self._pending.shape[1] != num_depths:
            raise ValueError(
                f"num_depths is {num_depths} but was {self._pending.shape[1]}: give the same number"
            )
        self._pending[_LOSS, depth - 1].add_(loss.detach().reshape(()))
        if accepted is not None and predicted is not None:
            self._has_counts = True
            self._pending[_ACCEPTED, depth - 1].add_(accepted)
            self._pending[_PREDICTED, depth - 1].add_(predicted)
        self._reduce_group, self._avg_group = reduce_group, avg_group

    def commit_step(self, scale: float = 1.0) -> None:
        """Keep the values recorded since the last call for the next report. Never waits.

        Args:
            scale: Factor for the losses, such as 1 / microbatches of this step, if it differs
                between the steps of one report.
        """
        if self._pending is not None and self._kept is not None:
            self._pending[_LOSS].mul_(scale)
            self._kept.add_(self._pending)
            self._pending.zero_()

    def discard_step(self) -> None:
        """Drop the values recorded since the last :meth:`commit_step`, of a skipped step."""
        if self._pending is not None:
            self._pending.zero_()

    def reset(self) -> None:
        """Drop all values and the cumulative counts, for another run."""
        self._pending = self._kept = self._ever = None
        self._has_counts = False

    def take(
        self,
        loss_scale: float,
        *,
        total_loss_dict: dict[str, Any] | None = None,
        num_steps: int = 1,
    ) -> dict[str, torch.Tensor]:
        """Reduce the metrics as :meth:`report` does, without copying to the host or writing.

        Returns:
            One element each, by name. Empty on ranks that recorded nothing.
        """
        self.commit_step()
        if self._kept is None:
            return {}
        sums = self._kept
        for group, is_mean in ((self._reduce_group, False), (self._avg_group, True)):
            (flat,) = sum_over_group([sums.flatten()], group)
            sums = flat.reshape(sums.shape).clone()
            if is_mean:
                sums[_LOSS] /= get_pg_size(group)
        self._kept.zero_()
        values: dict[str, torch.Tensor] = {}
        for index, loss in enumerate((sums[_LOSS] * loss_scale).unbind(), start=1):
            values[f"mtp_{index} loss"] = loss / num_steps
            if total_loss_dict is not None:
                add_losses(total_loss_dict, {f"mtp_{index} loss": loss})
        if self._has_counts:
            self._ever = sums if self._ever is None else self._ever + sums
            values |= _compute_rates("acceptance_rate", sums)
            values |= _compute_rates("cumulative_acceptance_rate", self._ever)
        return values

    def report(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any = None,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Any] | None = None,
        *,
        num_steps: int = 1,
    ) -> str:
        """Reduce the metrics over the ranks, write them, and reset them to zero.

        For each depth ``i`` the metrics are ``mtp_{i} loss`` and, if counts were recorded, in
        percent ``mtp_{i}_acceptance_rate`` since the last report and
        ``mtp_{i}_cumulative_acceptance_rate`` since the start of the run. Collectives: one sum over
        ``reduce_group`` and one over ``avg_group``, if the group has more than one rank. All their
        ranks call it and get the result.

        Args:
            loss_scale: Factor for the losses, usually 1 / number of microbatches.
            iteration: The step.
            writer: An object with ``add_scalar(name, value, step)``, or None.
            wandb_writer: An object with ``log(dict, step)``, or None.
            total_loss_dict: Sums to which the losses are added.
            num_steps: Steps recorded since the last report. The mean of their losses is written,
                while the sum is added to ``total_loss_dict``.

        Returns:
            An empty string: the console shows the losses through ``total_loss_dict``.
        """
        values = self.take(loss_scale, total_loss_dict=total_loss_dict, num_steps=num_steps)
        if values and (writer is not None or wandb_writer is not None):
            write_scalars(read_scalars(values), iteration, writer, wandb_writer)
        return ""


def _compute_rates(name: str, sums: torch.Tensor) -> dict[str, torch.Tensor]:
    percent = 100 * sums[_ACCEPTED] / sums[_PREDICTED].clamp(min=1)
    return {f"mtp_{index}_{name}": rate for index, rate in enumerate(percent.unbind(), start=1)}


@functools.cache
def get_mtp_metrics_tracker() -> MTPMetricsTracker:
    """Return the tracker of this process, for model code without one.

    Returns:
        The same tracker at every call.

    Example:
        >>> get_mtp_metrics_tracker() is get_mtp_metrics_tracker()
        True
    """
    return MTPMetricsTracker()


def has_mtp_metrics_tracker() -> bool:
    """Return whether the tracker of this process has been requested."""
    return get_mtp_metrics_tracker.cache_info().currsize > 0
