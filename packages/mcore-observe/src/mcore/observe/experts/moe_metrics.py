"""Metrics of mixture-of-experts routers: recorded by layer, reported over all ranks, and sent."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore.observe.loss_totals import add_losses
from mcore.observe.sinks import sanitize_metric_name
from mcore.observe.sinks.scalars import as_number, read_scalars
from mcore.parallel.groups import GroupLike, comm_device, get_pg_size
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.reductions import sum_over_group
from mcore.tensor.dtensor import is_dtensor
from mcore.versioning import internal_api

logger = logging.getLogger(__name__)


@dataclass
class _LayerMetric:
    """Values by layer, ``[num_layers]``: of the current step, and of earlier steps."""

    pending: torch.Tensor
    kept: torch.Tensor
    reduce_group: GroupLike | None = None
    avg_group: GroupLike | None = None
    needs_dp_avg: bool = True

    @classmethod
    def zeros(cls, num_layers: int, device: torch.device) -> _LayerMetric:
        return cls(torch.zeros(num_layers, device=device), torch.zeros(num_layers, device=device))

    def take(self) -> torch.Tensor:
        """Return all values and reset them to zero."""
        taken = self.kept + self.pending
        self.kept.zero_()
        self.pending.zero_()
        return taken


@dataclass(frozen=True)
class ReducedMoEMetrics:
    """Router metrics of all ranks, as means over the steps, still on the device.

    ``values`` has one element for each metric over the whole model, ``layers`` ``[num_layers]``.
    """

    values: dict[str, torch.Tensor]
    layers: dict[str, torch.Tensor]

    def by_layer(self) -> dict[str, torch.Tensor]:
        """Return the value of every layer as ``moe/{name}_layer_{i}``, with layers from 0."""
        return {
            f"moe/{name}_layer_{index}": value
            for name, vector in self.layers.items()
            for index, value in enumerate(vector.unbind())
        }

    def text_names(self) -> list[str]:
        """Return the names of the metrics that are not losses. The console shows them as text."""
        return [name for name in self.values if not name.endswith("loss")]

    def percentiles(
        self, wanted: Sequence[float] | Mapping[str, Sequence[float]] | None
    ) -> dict[str, torch.Tensor]:
        """Return ``{name}_p{percent}`` over the layers with a value other than zero.

        Copies to the host. ``wanted`` has the fractions, for all metrics or by name.
        """
        found: dict[str, torch.Tensor] = {}
        for name, vector in self.layers.items():
            fractions = wanted.get(name, ()) if isinstance(wanted, Mapping) else wanted or ()
            active = vector[vector != 0] if fractions else vector
            for fraction in fractions if active.numel() else ():
                found[f"{name}_p{int(fraction * 100)}"] = torch.quantile(active, fraction)
        return found


class MoEMetricsTracker:
    """Sums the values that routers record, by metric and layer, and reports them over all ranks.

    Recording adds on the device and never waits.

    Example:
        >>> tracker = MoEMetricsTracker()
        >>> tracker.record("load_balancing_loss", torch.tensor(0.5), layer_number=1, num_layers=2)
        >>> tracker.record("load_balancing_loss", torch.tensor(1.5), layer_number=2, num_layers=2)
        >>> totals = {}
        >>> tracker.report(loss_scale=1.0, iteration=1, total_loss_dict=totals)
        ''
        >>> totals
        {'load_balancing_loss': tensor([1.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        self._metrics: dict[str, _LayerMetric] = {}

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
        """Add a value of one layer to the current step. No communication, no wait.

        Args:
            name: The metric. Names that end in ``loss`` count as losses.
            value: One element.
            layer_number: The layer, from 1. A call with None is ignored.
            num_layers: Layers of the whole model, including those of multi-token prediction.
            reduce_group: The report sums over this group.
            avg_group: The report averages over this group.
            needs_dp_avg: The report averages over the data-parallel group.

        Raises:
            ValueError: A layer outside 1..num_layers, or a ``num_layers`` that differs from before.
        """
        if layer_number is None:
            return
        if not 1 <= layer_number <= num_layers:
            raise ValueError(f"layer_number is {layer_number}: give 1 to {num_layers}")
        if name not in self._metrics:
            self._metrics[name] = _LayerMetric.zeros(num_layers, value.device)
        metric = self._metrics[name]
        if metric.pending.numel() != num_layers:
            raise ValueError(
                f"{name!r} has {metric.pending.numel()} layers, but num_layers is {num_layers}: "
                "give the layers of the whole model in each call"
            )
        metric.pending[layer_number - 1].add_(value.detach().reshape(()))
        metric.reduce_group, metric.avg_group = reduce_group, avg_group
        metric.needs_dp_avg = needs_dp_avg

    def commit_step(self, scale: float = 1.0) -> None:
        """Keep the values recorded since the last call for the next report. Never waits.

        Args:
            scale: Factor for the values, such as 1 / microbatches of this step, if it differs
                between the steps of one report.
        """
        for metric in self._metrics.values():
            metric.kept.add_(metric.pending, alpha=scale)
            metric.pending.zero_()

    def discard_step(self) -> None:
        """Drop the values recorded since the last :meth:`commit_step`, of a skipped step."""
        for metric in self._metrics.values():
            metric.pending.zero_()

    def reset(self) -> None:
        """Drop all metrics and the number of layers, for another run."""
        self._metrics = {}

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
        """Reduce the metrics as :meth:`report` does, without copying to the host or writing.

        Returns:
            The metrics on the device.
        """
        if track_names is None:
            names = sorted(self._metrics)
        else:
            names = [track_names] if isinstance(track_names, str) else list(track_names)
        missing = [name for name in names if name not in self._metrics]
        if force_initialize and missing:
            if num_layers is None:
                raise ValueError(
                    f"force_initialize needs num_layers to make zeros for {missing}: give the "
                    "layers of the whole model"
                )
            known = next(iter(self._metrics.values()), None)
            device = comm_device() if known is None else known.pending.device
            for name in missing:
                total = num_layers + (mtp_num_layers or 0)
                self._metrics[name] = _LayerMetric.zeros(total, device)
        metrics = {name: self._metrics[name] for name in names if name in self._metrics}
        layers: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}
        for name, vector in _reduce_over_ranks(metrics, pg_collection).items():
            count = num_moe_layers
            if count is None:
                total = vector.numel() - (mtp_num_layers or 0) if num_layers is None else num_layers
                count = _count_moe_layers(total, moe_layer_freq) + (mtp_num_layers or 0)
            if count < 1:
                raise ValueError(
                    f"the model has {count} MoE layers: give the layers and their frequency, or "
                    "do not report MoE metrics"
                )
            layers[name] = vector * (loss_scale / num_steps)
            values[name] = layers[name].sum() / count
        reduced = ReducedMoEMetrics(values, layers)
        if total_loss_dict is not None:
            losses = {n: v * num_steps for n, v in values.items() if n.endswith("loss")}
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
        """Reduce the metrics over the ranks, write them, and reset them to zero.

        A metric is ``sum(values) * loss_scale / MoE layers``. Collectives: a sum over
        ``reduce_group``, means over ``avg_group`` and over ``dp``, a sum over ``pp``. Metrics that
        share a group share one collective, and a group of one rank has none. All ranks of these
        groups call it with the same names and get the result.

        Args:
            loss_scale: Factor for every value, usually 1 / number of microbatches.
            iteration: The step.
            writer: An object with ``add_scalar(name, value, step)``, or None.
            wandb_writer: An object with ``log(dict, step)``, or None.
            per_layer_logging: Also write the value of every layer.
            force_initialize: Take part with zeros for names that this rank never recorded, as
                pipeline stages without MoE layers must.
            track_names: The metrics. None means all that this rank recorded.
            num_layers: Layers of the model without multi-token prediction. ``force_initialize``
                needs it.
            num_moe_layers: Number of MoE layers. It replaces the next two arguments.
            moe_layer_freq: An int n for every n-th layer, or 0 or 1 for each layer. None means all.
            mtp_num_layers: Layers of multi-token prediction, which count as MoE layers.
            total_loss_dict: Sums to which the metrics with names that end in ``loss`` are added.
            percentiles: Fractions, for all metrics or by name. Those percentiles over the layers
                with a value other than zero are written as ``{name}_p{percent}``.
            pg_collection: An object with ``pp`` and ``dp``. None means the default ProcessGroups.
            num_steps: Steps recorded since the last report. Their mean is written, while their sum
                is added to ``total_loss_dict``.

        Returns:
            `` {name}: {value:.2f} |`` for each metric that is not a loss.

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
            return _format_text(read_scalars(texts))
        by_layer = reduced.by_layer() if per_layer_logging else {}
        numbers = read_scalars(reduced.values | by_layer | reduced.percentiles(percentiles))
        write_scalars(numbers, iteration, writer, wandb_writer)
        return _format_text({name: numbers[name] for name in texts})


def _reduce_over_ranks(
    metrics: Mapping[str, _LayerMetric], pg_collection: Any
) -> dict[str, torch.Tensor]:
    """Sum the values by layer over the ranks, and reset the metrics to zero."""
    vectors = {name: metric.take() for name, metric in metrics.items()}
    pgs = get_default_process_groups() if pg_collection is None else pg_collection
    dp, pp = getattr(pgs, "dp", None), getattr(pgs, "pp", None)
    _sum_by_group(vectors, {name: m.reduce_group for name, m in metrics.items()}, mean=False)
    _sum_by_group(vectors, {name: m.avg_group for name, m in metrics.items()}, mean=True)
    averaged = {name: dp if m.needs_dp_avg else None for name, m in metrics.items()}
    _sum_by_group(vectors, averaged, mean=True)
    # pp comes last: stages without MoE layers lack the other groups and get complete sums here.
    _sum_by_group(vectors, dict.fromkeys(metrics, pp), mean=False)
    return vectors


def _sum_by_group(
    vectors: dict[str, torch.Tensor], groups: Mapping[str, GroupLike | None], *, mean: bool
) -> None:
    """Replace each vector by its sum over its group, with one collective per group."""
    distinct = {id(group): group for group in groups.values() if group is not None}
    for key, group in distinct.items():
        names = [name for name, other in groups.items() if id(other) == key]
        sums = sum_over_group([vectors[name] for name in names], group)
        divisor = get_pg_size(group) if mean else 1
        vectors.update({name: s / divisor for name, s in zip(names, sums, strict=True)})


def _count_moe_layers(num_layers: int, moe_layer_freq: int | Sequence[int] | None) -> int:
    if moe_layer_freq is None:
        return num_layers
    if isinstance(moe_layer_freq, int):
        return sum(layer % moe_layer_freq == 0 for layer in range(num_layers))
    return sum(moe_layer_freq)


def write_scalars(
    numbers: Mapping[str, float], iteration: int, writer: Any, wandb_writer: Any
) -> None:
    """Write numbers of one step to the writers that are given."""
    if writer is not None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, iteration)
    if wandb_writer is not None:
        wandb_writer.log(dict(numbers), iteration)


def _format_text(values: Mapping[str, float]) -> str:
    return "".join(f" {name}: {value:.2f} |" for name, value in values.items())


@functools.cache
def get_moe_metrics_tracker() -> MoEMetricsTracker:
    """Return the tracker of this process, for layers without one.

    Returns:
        The same tracker at every call.

    Example:
        >>> get_moe_metrics_tracker() is get_moe_metrics_tracker()
        True
    """
    return MoEMetricsTracker()


def has_moe_metrics_tracker() -> bool:
    """Return whether the tracker of this process has been requested."""
    return get_moe_metrics_tracker.cache_info().currsize > 0


@internal_api
class _MoeMetricFanoutWriter:
    """Sends each scalar to a TensorBoard writer, MLflow and Comet.

    All other attributes belong to the TensorBoard writer.

    Args:
        tb_writer: A ``SummaryWriter``, or None.
        comet_logger: A Comet experiment, or None.
        mlflow_logger: An object with MLflow's ``log_metrics``, or None.
    """

    def __init__(self, tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> None:
        self._tb_writer = tb_writer
        self._comet_logger = comet_logger
        self._mlflow_logger = mlflow_logger
        self._warned: set[str] = set()

    @staticmethod
    def _sanitize(value: Any) -> Any:
        """Convert tensors with one element and NumPy scalars to Python numbers.

        A DTensor is gathered first, which is a collective over its mesh. Other values, larger
        tensors included, are returned unchanged.
        """
        if is_dtensor(value):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            return value.item() if value.numel() == 1 else value
        number = as_number(value)
        return value if number is None else number

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Send one scalar: to TensorBoard unchanged, to the others as a Python number.

        A tensor with more than one element is sent to TensorBoard only, with one warning per name.
        """
        if self._tb_writer is not None:
            self._tb_writer.add_scalar(name, value, iteration)
        scalar = self._sanitize(value)
        if isinstance(scalar, torch.Tensor):
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "%s has shape %s and is not sent to MLflow and Comet, which need one number",
                    name,
                    tuple(scalar.shape),
                )
            return
        if self._mlflow_logger is not None:
            self._mlflow_logger.log_metrics({sanitize_metric_name(name): scalar}, step=iteration)
        if self._comet_logger is not None:
            self._comet_logger.log_metrics({name: scalar}, step=iteration)

    def add_scalars(self, *args: Any, **kwargs: Any) -> None:
        """Send a group of scalars to TensorBoard, the only tracker that can show one."""
        if self._tb_writer is not None:
            self._tb_writer.add_scalars(*args, **kwargs)

    def flush(self) -> None:
        """Flush the TensorBoard writer."""
        if self._tb_writer is not None:
            self._tb_writer.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_tb_writer"), name)


@internal_api
def _build_moe_metric_writer(tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> Any:
    """Return a writer to all given trackers.

    Args:
        tb_writer: A ``SummaryWriter``, or None.
        comet_logger: A Comet experiment, or None.
        mlflow_logger: An object with MLflow's ``log_metrics``, or None.

    Returns:
        ``tb_writer`` itself without MLflow and Comet, else a writer that sends to all of them.

    Example:
        >>> _build_moe_metric_writer(None, None, None) is None
        True
    """
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)
