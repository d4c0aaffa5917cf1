"""Reduces metrics by layer over the ranks, and tells what they are over the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore.parallel.groups import GroupLike, get_pg_size
from mcore.parallel.process_groups import get_default_process_groups
from mcore.parallel.reductions import sum_over_group

__all__ = [
    "LayerMetric",
    "ReducedMoEMetrics",
    "count_moe_layers",
    "reduce_layer_metrics",
    "require_moe_layers",
]


@dataclass
class LayerMetric:
    """Values by layer: of the present step, and of the earlier steps since the last report.

    Attributes:
        pending: ``[num_layers]`` of the present step.
        kept: ``[num_layers]`` of the earlier steps.
        reduce_group: A report sums over this group.
        avg_group: A report averages over this group.
        needs_dp_avg: A report averages over the data-parallel group.
    """

    pending: torch.Tensor
    kept: torch.Tensor
    reduce_group: GroupLike | None = None
    avg_group: GroupLike | None = None
    needs_dp_avg: bool = True

    @classmethod
    def zeros(cls, num_layers: int, device: torch.device) -> LayerMetric:
        """Return a metric that nobody has recorded."""
        return cls(torch.zeros(num_layers, device=device), torch.zeros(num_layers, device=device))

    def take(self) -> torch.Tensor:
        """Return all values and start again from zero."""
        taken = self.kept + self.pending
        self.kept.zero_()
        self.pending.zero_()
        return taken


@dataclass(frozen=True)
class ReducedMoEMetrics:
    """Router metrics of all ranks, as means over the steps, still on the device.

    Attributes:
        values: One element for each metric, over the whole model.
        layers: ``[num_layers]`` for each metric.
    """

    values: dict[str, torch.Tensor]
    layers: dict[str, torch.Tensor]

    def by_layer(self) -> dict[str, torch.Tensor]:
        """Return every layer's value as ``moe/{name}_layer_{i}``, with layers from 0."""
        return {
            f"moe/{name}_layer_{index}": value
            for name, vector in self.layers.items()
            for index, value in enumerate(vector.unbind())
        }

    def text_names(self) -> list[str]:
        """Return the metrics that are no losses, which the console shows as text."""
        return [name for name in self.values if not name.endswith("loss")]

    def percentiles(
        self, wanted: Sequence[float] | Mapping[str, Sequence[float]] | None
    ) -> dict[str, torch.Tensor]:
        """Return percentiles over the layers whose value is not zero; copies to the host.

        Args:
            wanted: Fractions, for all metrics or by name; None for no percentiles.

        Returns:
            One element for each, as ``{name}_p{percent}``.
        """
        found: dict[str, torch.Tensor] = {}
        for name, vector in self.layers.items():
            fractions = wanted.get(name, ()) if isinstance(wanted, Mapping) else wanted or ()
            active = vector[vector != 0] if fractions else vector
            for fraction in fractions if active.numel() else ():
                found[f"{name}_p{int(fraction * 100)}"] = torch.quantile(active, fraction)
        return found


def reduce_layer_metrics(
    metrics: Mapping[str, LayerMetric],
    loss_scale: float,
    num_moe_layers: Callable[[torch.Tensor], int],
    num_steps: int,
    pg_collection: Any,
) -> ReducedMoEMetrics:
    """Reduce metrics over the ranks, and start them again from zero; copies nothing to the host.

    The collectives are those of :meth:`mcore.observe.MoEMetricsTracker.report`.

    Args:
        metrics: The metrics by name, in the same order on every rank.
        loss_scale: Factor for every value.
        num_moe_layers: Tells the number of layers with experts for values by layer.
        num_steps: Steps that were recorded.
        pg_collection: Something with ``pp`` and ``dp``; None is the default ProcessGroups.

    Returns:
        The metrics of all ranks.

    Example:
        >>> metric = LayerMetric(pending=torch.tensor([1.0, 3.0]), kept=torch.zeros(2))
        >>> reduce_layer_metrics({"z_loss": metric}, 1.0, len, 1, None).values
        {'z_loss': tensor(2.)}
    """
    vectors = {name: metric.take() for name, metric in metrics.items()}
    pgs = get_default_process_groups() if pg_collection is None else pg_collection
    dp, pp = getattr(pgs, "dp", None), getattr(pgs, "pp", None)
    _sum_by_group(vectors, {name: m.reduce_group for name, m in metrics.items()}, mean=False)
    _sum_by_group(vectors, {name: m.avg_group for name, m in metrics.items()}, mean=True)
    averaged = {name: dp if m.needs_dp_avg else None for name, m in metrics.items()}
    _sum_by_group(vectors, averaged, mean=True)
    # Last: stages without MoE layers know no groups of theirs, and get whole sums this way.
    _sum_by_group(vectors, dict.fromkeys(metrics, pp), mean=False)
    layers = {name: vector * (loss_scale / num_steps) for name, vector in vectors.items()}
    values = {name: vector.sum() / num_moe_layers(vector) for name, vector in layers.items()}
    return ReducedMoEMetrics(values, layers)


def count_moe_layers(
    num_layers: int, moe_layer_freq: int | Sequence[int] | None, mtp_num_layers: int | None = None
) -> int:
    """Count the layers with experts.

    Args:
        num_layers: Layers of the model without those of multi-token prediction.
        moe_layer_freq: Layers ``i`` with ``i % n == 0`` have experts (int), or 0 or 1 for each
            layer, or None for all.
        mtp_num_layers: Layers of multi-token prediction, which all have experts.

    Returns:
        The number, 1 or more.

    Raises:
        ValueError: No layer has experts.

    Example:
        >>> count_moe_layers(5, 2), count_moe_layers(4, [0, 1, 0, 1], 1), count_moe_layers(4, None)
        (3, 3, 4)
    """
    if moe_layer_freq is None:
        count = num_layers
    elif isinstance(moe_layer_freq, int):
        count = sum(layer % moe_layer_freq == 0 for layer in range(num_layers))
    else:
        count = sum(moe_layer_freq)
    return require_moe_layers(count + (mtp_num_layers or 0))


def require_moe_layers(num_moe_layers: int) -> int:
    """Return a number of MoE layers if there are any.

    Args:
        num_moe_layers: The number.

    Returns:
        The same.

    Raises:
        ValueError: It is below 1.

    Example:
        >>> require_moe_layers(2)
        2
    """
    if num_moe_layers < 1:
        raise ValueError(
            f"the model has {num_moe_layers} MoE layers; give the layers and their frequency, or "
            "do not report MoE metrics"
        )
    return num_moe_layers


def _sum_by_group(
    vectors: dict[str, torch.Tensor], groups: Mapping[str, GroupLike | None], *, mean: bool
) -> None:
    """Sum each vector over its group in place of the old one, with one collective a group."""
    distinct = {id(group): group for group in groups.values() if group is not None}
    for key, group in distinct.items():
        names = [name for name, other in groups.items() if id(other) == key]
        sums = sum_over_group([vectors[name] for name in names], group)
        divisor = get_pg_size(group) if mean else 1
        vectors.update({name: s / divisor for name, s in zip(names, sums, strict=True)})
