"""Medians, extremes, spreads and scores of one number per rank, without a Python loop."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

Extremes: TypeAlias = "tuple[tuple[float, int], tuple[float, int]]"  # smallest and largest
_NOBODY: Extremes = ((math.nan, -1), (math.nan, -1))

# 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
# Below 1 % of the median, differences count as noise.
_MIN_RELATIVE_SPREAD = 0.01


def median(values: torch.Tensor) -> float:
    """Return the median: the mean of the two middle values where their number is even.

    Example:
        >>> median(torch.tensor([4.0, 1.0, 3.0, 2.0]))
        2.5
    """
    num = values.numel()
    if num == 0:
        return math.nan
    lower = values.median()  # of an even number of values, torch takes the lower one
    if num % 2 == 0 and int((values <= lower).sum()) == num // 2:
        return (lower.item() + values.where(values > lower, torch.inf).amin().item()) / 2
    return lower.item()


def robust_spread(values: torch.Tensor, center: float) -> float:
    """Return a standard deviation around the median that outliers do not inflate.

    The robust z of a value is its distance from the median in units of it (Iglewicz and Hoaglin,
    How to Detect and Handle Outliers, 1993, with a floor): ``max(1.4826 * mad, 0.01 * |center|)``.
    """
    return max(_MAD_TO_SIGMA * median((values - center).abs_()), _least_spread(center))


def center_and_spread(values: torch.Tensor, side: int, min_z: float) -> tuple[float, float]:
    """Return median and robust spread; 0 where nothing on the bad side can be ``min_z`` away.

    With thousands of ranks the medians are what costs, so the second one is only taken if the
    worst value would stand out of the smallest spread that there can be.
    """
    finite = finite_part(values)
    if not finite.numel():
        return math.nan, 0.0
    center = median(finite)
    worst = (finite.amax() if side > 0 else finite.amin()).item()
    distance = side * (worst - center)
    if distance < min_z * _least_spread(center):
        return center, 0.0
    spread = robust_spread(finite, center)
    return center, spread if distance >= min_z * spread else 0.0


def finite_part(values: torch.Tensor) -> torch.Tensor:
    """Return the values that are finite: the same tensor where all are."""
    return values if _is_finite(values) else values[values.isfinite()]


def extremes(rows: torch.Tensor, ranks: torch.Tensor) -> list[Extremes]:
    """Return the smallest and the largest value of each row, and the lowest rank that has each.

    ``ranks`` are those of the columns, all different. Values that are not finite take no part; NaN
    and -1 where no value is finite.

    Example:
        >>> extremes(torch.tensor([[3.0, 1.0, 3.0]]), torch.arange(3))
        [((1.0, 1), (3.0, 0))]
    """
    if not bool((ranks[1:] > ranks[:-1]).all()):
        ranks, order = ranks.sort()
        rows = rows[:, order]
    low = high = rows
    if not _is_finite(rows):
        is_finite = rows.isfinite()
        low, high = rows.where(is_finite, torch.inf), rows.where(is_finite, -torch.inf)
    # Of equal values argmin and argmax take the first one.
    return [
        (smallest, largest) if math.isfinite(smallest[0]) else _NOBODY
        for smallest, largest in zip(
            _at(low, low.argmin(dim=1), ranks), _at(high, high.argmax(dim=1), ranks), strict=True
        )
    ]


def relative_scores(medians: torch.Tensor) -> torch.Tensor:
    """Return the fastest rank's median over that of each rank, ``[..., world]``; NaN: no data."""
    return medians.where(medians > 0, torch.inf).amin(dim=-1, keepdim=True) / medians


def _at(rows: torch.Tensor, columns: torch.Tensor, ranks: torch.Tensor) -> list[tuple[float, int]]:
    values = rows.gather(1, columns.unsqueeze(1)).flatten().tolist()
    return list(zip(values, ranks[columns].tolist(), strict=True))


def _least_spread(center: float) -> float:
    return _MIN_RELATIVE_SPREAD * abs(center)


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, by their sum, which is much cheaper than asking each.

    A sum that overflows is a False that costs time only.
    """
    return math.isfinite(values.sum().item())
