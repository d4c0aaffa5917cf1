"""Metrics of mixture-of-experts routers: recorded by layer, reported over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mcore.observe.host_reads import read_scalars
from mcore.observe.loss_totals import add_losses
from mcore.observe.moe_reduction import (
    LayerMetric,
    ReducedMoEMetrics,
    count_moe_layers,
    reduce_layer_metrics,
    require_moe_layers,
)
from mcore.parallel.groups import GroupLike, comm_device

__all__ = [
    "MoEMetricsTracker",
    "format_moe_text",
    "get_moe_metrics_tracker",
    "has_moe_metrics_tracker",
    "write_scalars",
]


class MoEMetricsTracker:
    """Adds up what routers record, by metric and layer, and reports it over all ranks.

    Recording adds on the device and waits for nothing.

    Example:
        >>> tracker = MoEMetricsTracker()
        >>> tracker.record("load_balancing_loss", torch.tensor(0.5), layer_number=1, num_layers=2)
        >>> tracker.record("load_balancing_loss", torch.tensor(1.5), layer_number=2, num_layers=2)
        >>> totals = {}
        >>> tracker.report(loss_scale=1.0, iteration=1, total_loss_dict=totals)
        ''
        >>> totals
        {'load_balancing_loss': tensor([1.])}
    """

    def __init__(self) -> None:
        self._metrics: dict[str, LayerMetric] = {}

    def record(
        self,
        name: str,
        value: torch.Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: GroupLike | None = None,
        avg_group: GroupLike | None = None,
        needs_dp_avg: bool = True,
    ) -> None:
        """Add a value of one layer to the present step. No communication, no wait.

        Args:
            name: The metric; names that end in ``loss`` count as losses.
            value: One element.
            layer_number: The layer, from 1; None is ignored.
            num_layers: Layers of the whole model, those of multi-token prediction included.
            reduce_group: The report sums over this group.
            avg_group: The report averages over this group.
            needs_dp_avg: The report averages over the data-parallel group.

        Raises:
            ValueError: A layer outside 1..num_layers, or another ``num_layers`` than before.
        """
        if layer_number is None:
            return
        if not 1 <= layer_number <= num_layers:
            raise ValueError(f"layer_number is {layer_number}; give 1 to {num_layers}")
        if name not in self._metrics:
            self._metrics[name] = LayerMetric.zeros(num_layers, value.device)
        metric = self._metrics[name]
        if metric.pending.numel() != num_layers:
            raise ValueError(
                f"{name!r} has {metric.pending.numel()} layers, num_layers is {num_layers}; give "
                "the layers of the whole model each time"
            )
        metric.pending[layer_number - 1].add_(value.detach().reshape(()))
        metric.reduce_group, metric.avg_group = reduce_group, avg_group
        metric.needs_dp_avg = needs_dp_avg

    def commit_step(self, scale: float = 1.0) -> None:
        """Keep what was recorded since the last call for the next report. No wait.

        Args:
            scale: Factor for the values, such as 1 / microbatches of this step, where steps of
                one report differ in it.
        """
        for metric in self._metrics.values():
            metric.kept.add_(metric.pending, alpha=scale)
            metric.pending.zero_()

    def discard_step(self) -> None:
        """Drop what was recorded since the last :meth:`commit_step`: the step was skipped."""
        for metric in self._metrics.values():
            metric.pending.zero_()

    def take(
        self,
        loss_scale: float,
        *,
        force_initialize: bool = False,
        track_names: str | Sequence[str] | None = None,
        num_layers: int | None = None,
        num_moe_layers: int | None = None,
        moe_layer_freq: int | Sequence[int] | None = None,
        mtp_num_layers: int | None = None,
        total_loss_dict: dict[str, Any] | None = None,
        pg_collection: Any = None,
        num_steps: int = 1,
    ) -> ReducedMoEMetrics:
        """Do as :meth:`report`, but copy nothing to the host and write nothing.

        Returns:
            The metrics on the device.
        """
        names = self._tracked(track_names)
        if force_initialize:
            self._initialize(names, num_layers, mtp_num_layers)

        def moe_layers(vector: torch.Tensor) -> int:
            if num_moe_layers is not None:
                return require_moe_layers(num_moe_layers)
            total = vector.numel() - (mtp_num_layers or 0) if num_layers is None else num_layers
            return count_moe_layers(total, moe_layer_freq, mtp_num_layers)

        metrics = {name: self._metrics[name] for name in names if name in self._metrics}
        reduced = reduce_layer_metrics(metrics, loss_scale, moe_layers, num_steps, pg_collection)
        if total_loss_dict is not None:
            losses = {n: v * num_steps for n, v in reduced.values.items() if n.endswith("loss")}
            add_losses(total_loss_dict, losses)
        return reduced

    def report(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any = None,
        wandb_writer: Any = None,
        per_layer_logging: bool = False,
        force_initialize: bool = False,
        track_names: str | Sequence[str] | None = None,
        num_layers: int | None = None,
        num_moe_layers: int | None = None,
        moe_layer_freq: int | Sequence[int] | None = None,
        mtp_num_layers: int | None = None,
        total_loss_dict: dict[str, Any] | None = None,
        percentiles: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        pg_collection: Any = None,
        *,
        num_steps: int = 1,
    ) -> str:
        """Reduce the metrics over the ranks, write them, and start again from zero.

        A metric is ``sum(values) * loss_scale / MoE layers``. Collectives, each over a group that
        has more than one rank, and one for all metrics that share it: sum over ``reduce_group``,
        sum over ``avg_group`` and over ``dp`` (then divided), sum over ``pp``. All ranks of
        these groups call it with the same names and get the result.

        Args:
            loss_scale: Factor for every value, usually 1 / number of microbatches.
            iteration: The step.
            writer: Anything with ``add_scalar(name, value, step)``, or None.
            wandb_writer: Anything with ``log(dict, step)``, or None.
            per_layer_logging: Also write every layer's value.
            force_initialize: Take part with zeros for names that this rank never recorded, as
                pipeline stages without MoE layers must.
            track_names: The metrics; None is all that this rank recorded.
            num_layers: Layers of the model without multi-token prediction; needed by
                ``force_initialize``.
            num_moe_layers: MoE layers, instead of the next two.
            moe_layer_freq: Every n-th layer is one (int), or 0 or 1 for each layer; None is all.
            mtp_num_layers: Layers of multi-token prediction, which count as MoE layers.
            total_loss_dict: Sums that get the metrics whose name ends in ``loss``.
            percentiles: Fractions, for all metrics or by name: also write those percentiles over
                the layers whose value is not zero, as ``{name}_p{percent}``.
            pg_collection: Something with ``pp`` and ``dp``; None is the default ProcessGroups.
            num_steps: Steps recorded since the last report: what is written is their mean, while
                ``total_loss_dict`` gets their sum.

        Returns:
            `` {name}: {value:.2f} |`` for each metric that is no loss.

        Raises:
            ValueError: ``force_initialize`` without ``num_layers``, or a model without MoE layers.
        """
        reduced = self.take(
            loss_scale,
            force_initialize=force_initialize,
            track_names=track_names,
            num_layers=num_layers,
            num_moe_layers=num_moe_layers,
            moe_layer_freq=moe_layer_freq,
            mtp_num_layers=mtp_num_layers,
            total_loss_dict=total_loss_dict,
            pg_collection=pg_collection,
            num_steps=num_steps,
        )
        texts = {name: reduced.values[name] for name in reduced.text_names()}
        if writer is None and wandb_writer is None:
            return format_moe_text(read_scalars(texts))
        by_layer = reduced.by_layer() if per_layer_logging else {}
        numbers = read_scalars(reduced.values | by_layer | reduced.percentiles(percentiles))
        write_scalars(numbers, iteration, writer, wandb_writer)
        return format_moe_text({name: numbers[name] for name in texts})

    def _tracked(self, track_names: str | Sequence[str] | None) -> list[str]:
        if track_names is None:
            return sorted(self._metrics)
        return [track_names] if isinstance(track_names, str) else list(track_names)

    def _initialize(
        self, names: Iterable[str], num_layers: int | None, mtp_num_layers: int | None
    ) -> None:
        missing = [name for name in names if name not in self._metrics]
        if missing and num_layers is None:
            raise ValueError(
                f"force_initialize needs num_layers to make zeros for {missing}; give the layers "
                "of the whole model"
            )
        known = next(iter(self._metrics.values()), None)
        device = comm_device() if known is None else known.pending.device
        for name in missing:
            total = (num_layers or 0) + (mtp_num_layers or 0)
            self._metrics[name] = LayerMetric.zeros(total, device)


def write_scalars(
    numbers: Mapping[str, float], iteration: int, writer: Any, wandb_writer: Any
) -> None:
    """Write numbers of one step to the writers that are there.

    Args:
        numbers: Numbers by name.
        iteration: The step.
        writer: Anything with ``add_scalar(name, value, step)``, or None.
        wandb_writer: Anything with ``log(dict, step)``, or None.

    Example:
        >>> write_scalars({"z_loss": 0.5}, 1, None, None)
    """
    if writer is not None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, iteration)
    if wandb_writer is not None:
        wandb_writer.log(dict(numbers), iteration)


def format_moe_text(values: Mapping[str, float]) -> str:
    """Format metrics that are no losses for the console line.

    Args:
        values: Numbers by name.

    Returns:
        `` {name}: {value:.2f} |`` for each.

    Example:
        >>> format_moe_text({"expert_load_ratio": 1.25})
        ' expert_load_ratio: 1.25 |'
    """
    return "".join(f" {name}: {value:.2f} |" for name, value in values.items())


@functools.cache
def get_moe_metrics_tracker() -> MoEMetricsTracker:
    """Return the tracker of this process, for layers that were given none.

    Returns:
        The same tracker at every call.

    Example:
        >>> get_moe_metrics_tracker() is get_moe_metrics_tracker()
        True
    """
    return MoEMetricsTracker()


def has_moe_metrics_tracker() -> bool:
    """Say whether anybody has asked for the tracker of this process.

    Returns:
        True after the first call of :func:`get_moe_metrics_tracker`.

    Example:
        >>> _ = get_moe_metrics_tracker()
        >>> has_moe_metrics_tracker()
        True
    """
    return get_moe_metrics_tracker.cache_info().currsize > 0
