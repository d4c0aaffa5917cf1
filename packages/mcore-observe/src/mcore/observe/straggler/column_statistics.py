"""Medians, extremes and robust z-scores of one number per rank, without a Python loop."""

from __future__ import annotations

import math

import torch

from mcore.observe.straggler.ranked_values import NOBODY, Extremes

__all__ = ["extremes", "finite_part", "least_spread", "median", "robust_spread", "spread_of"]

# 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
# Below 1 % of the median, differences count as noise.
_MIN_RELATIVE_SPREAD = 0.01


def median(values: torch.Tensor) -> float:
    """Return the median: the mean of the two middle values where their number is even.

    Args:
        values: ``[n]``, finite.

    Returns:
        The median; NaN of no values.

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


def spread_of(values: torch.Tensor, center: float) -> float:
    """Return the robust spread of values around their median.

    Args:
        values: ``[n]``, finite.
        center: Their median.

    Returns:
        The spread, in the unit of the values.

    Example:
        >>> spread_of(torch.tensor([100.0, 101.0, 99.0, 100.0, 150.0]), center=100.0)
        1.4826
    """
    return robust_spread(center, median((values - center).abs_()))


def robust_spread(center: float, mad: float) -> float:
    """Return a standard deviation that outliers do not inflate.

    The robust z of a value is its distance from the median in units of it (Iglewicz and Hoaglin,
    How to Detect and Handle Outliers, 1993, with a floor).

    Args:
        center: The median ``m``.
        mad: The median of ``|x - m|``.

    Returns:
        ``max(1.4826 * mad, 0.01 * |m|)``, in the unit of the values.

    Example:
        >>> robust_spread(100.0, mad=1.0)
        1.4826
    """
    return max(_MAD_TO_SIGMA * mad, least_spread(center))


def least_spread(center: float) -> float:
    """Return the floor of the spread, which costs nothing to know.

    Example:
        >>> least_spread(-200.0)
        2.0
    """
    return _MIN_RELATIVE_SPREAD * abs(center)


def finite_part(values: torch.Tensor) -> torch.Tensor:
    """Return the values that are finite: the same tensor where all are.

    Example:
        >>> finite_part(torch.tensor([1.0, float("nan")]))
        tensor([1.])
    """
    return values if _is_finite(values) else values[values.isfinite()]


def extremes(rows: torch.Tensor, ranks: torch.Tensor) -> list[Extremes]:
    """Find the smallest and the largest value of each row, and the lowest rank that has each.

    Args:
        rows: ``[k, n]``; values that are not finite take no part.
        ranks: ``[n]``, the rank of each column, all different.

    Returns:
        ``(smallest, rank), (largest, rank)`` of each row; NaN and -1 where no value is finite.

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
        (smallest, largest) if math.isfinite(smallest[0]) else NOBODY
        for smallest, largest in zip(
            _at(low, low.argmin(dim=1), ranks), _at(high, high.argmax(dim=1), ranks), strict=True
        )
    ]


def _at(rows: torch.Tensor, columns: torch.Tensor, ranks: torch.Tensor) -> list[tuple[float, int]]:
    values = rows.gather(1, columns.unsqueeze(1)).flatten().tolist()
    return list(zip(values, ranks[columns].tolist(), strict=True))


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, by their sum, which is much cheaper than asking each.

    A sum that overflows is a False that costs time only.
    """
    return math.isfinite(values.sum().item())
