"""Scores of ranks: how fast against the fastest rank, and against their own best."""

from __future__ import annotations

import torch

__all__ = ["BestMedians", "below", "relative_scores"]


def relative_scores(medians: torch.Tensor) -> torch.Tensor:
    """Compare each rank with the fastest.

    Args:
        medians: Median range times, ``[num_sections, world]``; NaN where nothing was timed.

    Returns:
        The same shape: the fastest rank's median over the rank's own. 1.0 is the fastest, 0.5
        takes twice as long, NaN has no data.

    Example:
        >>> relative_scores(torch.tensor([[9.9, 15.0, float("nan")]]))
        tensor([[1.0000, 0.6600,    nan]])
    """
    return medians.where(medians.isfinite(), torch.inf).amin(dim=1, keepdim=True) / medians


class BestMedians:
    """The best median that each rank ever had, by section.

    Over the current median that is the individual score: 1.0 is as fast as ever, 0.5 takes twice
    as long.

    Example:
        >>> best = BestMedians()
        >>> best.with_new(torch.tensor([[10.0, 20.0]]))
        tensor([[10., 20.]])
        >>> best.with_new(torch.tensor([[20.0, 10.0]]))
        tensor([[10., 10.]])
    """

    def __init__(self) -> None:
        self._best: torch.Tensor | None = None

    def with_new(self, medians: torch.Tensor) -> torch.Tensor:
        """Remember new medians.

        Args:
            medians: Median range times, ``[num_sections, world]``; NaN where nothing was timed.

        Returns:
            The best so far, these included, of the same shape; NaN where there never was any. It
            stays as it is when more are remembered.
        """
        self._best = medians if self._best is None else torch.fmin(self._best, medians)
        return self._best


def below(scores: tuple[float, ...], threshold: float, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """List the ranks whose score is below a threshold; those without data are not.

    Example:
        >>> below((1.0, 0.6, float("nan")), 0.75, (0, 1, 2))
        (1,)
    """
    return tuple(rank for rank, score in zip(ranks, scores, strict=True) if score < threshold)
