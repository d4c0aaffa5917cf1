"""Scores of ranks: how fast against the fastest rank, and against their own best."""

from __future__ import annotations

from mcore.observe.straggler.rank_numbers import Medians

__all__ = ["BestMedians", "below"]


class BestMedians:
    """The best median that each rank ever had, by section.

    Example:
        >>> from mcore.observe.straggler.few_ranks import ListedMedians
        >>> best = BestMedians()
        >>> best.with_new(ListedMedians([[10.0, 20.0]])).of_section(0)
        [10.0, 20.0]
        >>> best.with_new(ListedMedians([[20.0, 10.0]])).of_section(0)
        [10.0, 10.0]
    """

    def __init__(self) -> None:
        self._best: Medians | None = None

    def with_new(self, medians: Medians) -> Medians:
        """Remember new medians.

        Args:
            medians: As many as each time before, and of the same class.

        Returns:
            The best so far, these included. It stays as it is when more are remembered.
        """
        self._best = medians if self._best is None else self._best.best_of(medians)
        return self._best


def below(scores: tuple[float, ...], threshold: float, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """List the ranks whose score is below a threshold; those without data are not.

    Example:
        >>> below((1.0, 0.6, float("nan")), 0.75, (0, 1, 2))
        (1,)
    """
    return tuple(rank for rank, score in zip(ranks, scores, strict=True) if score < threshold)
