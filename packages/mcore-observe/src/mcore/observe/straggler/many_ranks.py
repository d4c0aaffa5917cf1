"""The numbers of many ranks as tensors: no loop in Python over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from mcore.observe.straggler.column_statistics import (
    extremes,
    finite_part,
    least_spread,
    median,
    spread_of,
)
from mcore.observe.straggler.ranked_values import Extremes
from mcore.observe.straggler.rows import METRICS

__all__ = ["TensorMedians", "TensorMetrics"]


class TensorMetrics:
    """The metrics of many ranks.

    Args:
        columns: ``[7, world]`` in the order of ``METRICS``.
        ranks: The rank of each column.

    Example:
        >>> values = torch.tensor([100.0, 101.0, 99.0, 100.0, 150.0])
        >>> metrics = TensorMetrics(values.expand(7, 5), torch.arange(5))
        >>> metrics.center_and_spread("elapsed_ms", side=1, min_z=3.5)
        (100.0, 1.4826)
        >>> metrics.extremes("elapsed_ms")
        ((99.0, 2), (150.0, 4))
    """

    def __init__(self, columns: torch.Tensor, ranks: torch.Tensor) -> None:
        self._columns = dict(zip(METRICS, columns.unbind(), strict=True))
        self._matrix = columns
        self._ranks = ranks

    def values(self, metric: str) -> Sequence[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Metrics`."""
        values: list[float] = self._columns[metric].tolist()
        return values

    def extremes(self, metric: str) -> Extremes:
        """See :class:`mcore.observe.straggler.rank_numbers.Metrics`."""
        return self._extremes[metric]

    def center_and_spread(self, metric: str, side: int, min_z: float) -> tuple[float, float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Metrics`.

        With thousands of ranks the medians are what costs, so the second one is only taken if the
        worst value would stand out of the smallest spread that there can be.
        """
        finite = finite_part(self._columns[metric])
        if not finite.numel():
            return math.nan, 0.0
        center = median(finite)
        worst = (finite.amax() if side > 0 else finite.amin()).item()
        distance = side * (worst - center)
        if distance < min_z * least_spread(center):
            return center, 0.0
        spread = spread_of(finite, center)
        return center, spread if distance >= min_z * spread else 0.0

    @cached_property
    def _extremes(self) -> dict[str, Extremes]:
        return dict(zip(METRICS, extremes(self._matrix, self._ranks), strict=True))


class TensorMedians:
    """Medians of many ranks.

    Args:
        by_section: ``[num_sections, world]``; 0 and below count as no data.

    Example:
        >>> TensorMedians(torch.tensor([[10.0, 16.0, 0.0]])).relative(0)
        [1.0, 0.625, nan]
    """

    def __init__(self, by_section: torch.Tensor) -> None:
        self._by_section = by_section.where(by_section > 0, torch.nan)

    def of_section(self, section: int) -> list[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        medians: list[float] = self._by_section[section].tolist()
        return medians

    def best_of(self, other: TensorMedians) -> TensorMedians:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        return TensorMedians(torch.fmin(self._by_section, other._by_section))

    def relative(self, section: int) -> list[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        medians = self._by_section[section]
        fastest = medians.where(medians > 0, torch.inf).amin()
        scores: list[float] = (fastest / medians).tolist()
        return scores

    def individual(self, best: TensorMedians, section: int) -> list[float]:
        """See :class:`mcore.observe.straggler.rank_numbers.Medians`."""
        scores: list[float] = (best._by_section[section] / self._by_section[section]).tolist()
        return scores
