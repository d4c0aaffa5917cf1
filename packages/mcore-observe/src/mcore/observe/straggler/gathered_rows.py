"""What all ranks said in one report: their rows, and what rank 0 decides with its own."""

from __future__ import annotations

import torch

from mcore.observe.straggler.rows import ENABLED, LOG_INTERVAL, TOTAL_FLOPS, WANTED

__all__ = ["FEW_NUMBERS", "GatheredRows"]

# Up to so many numbers plain Python works out a report two to five times faster than torch, which
# takes microseconds for each call whatever it is given.
FEW_NUMBERS = 1024


class GatheredRows:
    """The rows of one exchange.

    Args:
        matrix: One row a rank in the group's order, ``[world, length]`` float64 on the CPU.
        ranks: The rank of each row, as given to ``configure``.
        rank_ids: The same, int64 ``[world]``.

    Attributes:
        matrix: As given.
        ranks: As given.
        rank_ids: As given.
        lists: The same numbers as lists where there are few, else None.
        is_on: Whether rank 0 times ranges.
        wanted: The state that rank 0 wants, which all ranks take.
        has_interval: Whether rank 0 is on and gave an interval, so that there is a report.
        log_interval: Iterations since the last report, as rank 0 says; 0 where it gave none.
        total_flops: Operations of the job in that time, as rank 0 says.

    Example:
        >>> rows = GatheredRows(torch.zeros(2, 24, dtype=torch.float64), (0, 1), torch.arange(2))
        >>> rows.is_on, rows.wanted, rows.ranks_unlike(ENABLED)
        (False, False, [])
    """

    def __init__(
        self, matrix: torch.Tensor, ranks: tuple[int, ...], rank_ids: torch.Tensor
    ) -> None:
        self.matrix = matrix
        self.ranks = ranks
        self.rank_ids = rank_ids
        self.lists: list[list[float]] | None = (
            matrix.tolist() if matrix.numel() <= FEW_NUMBERS else None
        )
        index = ranks.index(0)
        self._deciding = matrix[index].tolist() if self.lists is None else self.lists[index]
        self.is_on = bool(self._deciding[ENABLED])
        self.wanted = bool(self._deciding[WANTED])
        self.has_interval = self.is_on and self._deciding[LOG_INTERVAL] > 0
        self.log_interval = int(self._deciding[LOG_INTERVAL]) if self.has_interval else 0
        self.total_flops: float = self._deciding[TOTAL_FLOPS]

    def columns(self, which: slice) -> list[tuple[float, ...]]:
        """Return some columns as plain numbers, one value a rank in each."""
        if self.lists is None:
            return [tuple(column) for column in self.matrix[:, which].t().tolist()]
        return list(zip(*(row[which] for row in self.lists), strict=True))

    def ranks_unlike(self, column: int) -> list[int]:
        """List the ranks whose number in a column is not that of rank 0, in the group's order."""
        expected = self._deciding[column]
        if self.lists is not None:
            by_rank = zip(self.ranks, self.lists, strict=True)
            return [rank for rank, row in by_rank if row[column] != expected]
        differ = self.matrix[:, column] != expected
        return [self.ranks[index] for index in differ.nonzero().flatten().tolist()]
