"""Medians, extremes, spreads and scores of numbers by rank, without a loop over the ranks."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

# The smallest and the largest value, each with the index where it comes first.
Extremes: TypeAlias = "tuple[tuple[float, int], tuple[float, int]]"
_NOBODY: Extremes = ((math.nan, -1), (math.nan, -1))

# 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
# Below 1 % of the median, differences count as noise.
_MIN_RELATIVE_SPREAD = 0.01


def row_medians(rows: torch.Tensor) -> list[float]:
    """Return the median of the finite values of each row: of two middle ones, their mean."""
    num_known = [rows.shape[1]] * len(rows)
    if not _is_finite(rows):
        is_finite = rows.isfinite()
        rows, num_known = rows.where(is_finite, torch.nan), is_finite.sum(dim=1).tolist()
    # The lower one of two; with dim= torch would also find its index, which takes 50 % longer.
    lower = torch.stack([row.nanmedian() for row in rows])
    is_above = rows > lower.unsqueeze(1)
    upper = rows.where(is_above, torch.inf).amin(dim=1)
    numbers = zip(
        lower.tolist(), upper.tolist(), is_above.sum(dim=1).tolist(), num_known, strict=True
    )
    return [
        (low + high) / 2 if 2 * num_above == known else low
        for low, high, num_above, known in numbers
    ]


def least_spread(center: float) -> float:
    """Return the floor of :func:`robust_spread`, which is free to compute."""
    return _MIN_RELATIVE_SPREAD * abs(center)


def robust_spread(values: torch.Tensor, center: float) -> float:
    """Return a standard deviation of ``[n]`` values around their median that no outlier inflates.

    The robust z of a value is its distance from the median in units of it (Iglewicz and Hoaglin,
    How to Detect and Handle Outliers, 1993, with a floor): ``max(1.4826 * mad, 0.01 * |center|)``.
    """
    [mad] = row_medians((values - center).abs_().unsqueeze(0))
    return max(_MAD_TO_SIGMA * mad, least_spread(center))


def row_extremes(rows: torch.Tensor) -> list[Extremes]:
    """Return the extremes of the finite values of each row; NaN and -1 where there are none."""
    low = high = rows
    if not _is_finite(rows):
        is_finite = rows.isfinite()
        low, high = rows.where(is_finite, torch.inf), rows.where(is_finite, -torch.inf)
    # Of equal values min and max take the first one.
    ends = zip(*(part.tolist() for part in (*low.min(dim=1), *high.max(dim=1))), strict=True)
    return [
        ((smallest, first), (largest, last)) if math.isfinite(smallest) else _NOBODY
        for smallest, first, largest, last in ends
    ]


def relative_scores(medians: torch.Tensor) -> torch.Tensor:
    """Return the fastest rank's median over that of each rank, ``[..., world]``; NaN: no data."""
    return medians.nan_to_num(torch.inf, torch.inf).amin(dim=-1, keepdim=True) / medians


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, by their sum, which is much cheaper than checking each.

    A sum that overflows gives a False that only costs time.
    """
    return math.isfinite(values.sum().item())
