"""What a report asks of the numbers of all ranks, whether they are few or many.

:mod:`mcore.observe.straggler.few_ranks` holds them as lists and
:mod:`mcore.observe.straggler.many_ranks` as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from mcore.observe.straggler.ranked_values import Extremes

__all__ = ["Medians", "Metrics"]

_Self = TypeVar("_Self", bound="Medians")


class Metrics(Protocol):
    """The metrics of all ranks, in the form that suits their number."""

    def values(self, metric: str) -> Sequence[float]:
        """Return the value of each rank, which need not be finite."""

    def extremes(self, metric: str) -> Extremes:
        """Return the smallest and the largest finite value, each with the lowest rank that has it.

        NaN and rank -1 where no value is finite.
        """

    def center_and_spread(self, metric: str, side: int, min_z: float) -> tuple[float, float]:
        """Return the median and the robust spread of the finite values.

        The spread may be 0 where no value is ``min_z`` spreads away from the median on the bad
        side, 1 for high and -1 for low values: that can be known without it.
        """


class Medians(Protocol):
    """Median range times by section and rank; NaN where nothing was timed."""

    def of_section(self, section: int) -> list[float]:
        """Return the medians of all ranks."""

    def best_of(self: _Self, other: _Self) -> _Self:
        """Return the smaller one of each two, or the one that is known."""

    def relative(self, section: int) -> list[float]:
        """Return the fastest rank's median over that of each rank.

        1.0 is the fastest, 0.5 takes twice as long, NaN has no data.
        """

    def individual(self: _Self, best: _Self, section: int) -> list[float]:
        """Return the best median over the current one of each rank.

        1.0 is as fast as ever, 0.5 takes twice as long, NaN has no data.
        """
