"""Creation of process groups from rank lists, one group for each set of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["GroupMaker"]


class GroupMaker:
    """Creates groups and hands out the existing one when a set of ranks comes again.

    On an accelerator every communicator costs memory and start-up time, and many parallelisms of
    size 1 or of full size have the same ranks. The world group serves the set of all ranks. All
    ranks of the world must make the same calls in the same order.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        everyone = tuple(range(dist.get_world_size()))
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}

    def adopt(self, rank_lists: Iterable[Sequence[int]], group: dist.ProcessGroup | None) -> None:
        """Remember groups that exist; ``group`` is the one of this rank, if it is in any."""
        for ranks in rank_lists:
            self._made.setdefault(tuple(ranks), group if self._rank in ranks else None)

    def knows(self, rank_lists: Iterable[Sequence[int]]) -> bool:
        """Say whether every one of the lists has its group."""
        return all(tuple(ranks) in self._made for ranks in rank_lists)

    def group_of(
        self, rank_lists: Sequence[Sequence[int]], description: str
    ) -> dist.ProcessGroup | None:
        """Return this rank's group among disjoint lists, creating those that do not exist.

        Args:
            rank_lists: Ascending global ranks of each group, the same on every rank of the world.
            description: The name of the groups in torch's logs.

        Returns:
            The group whose list has this rank, or None.
        """
        missing = [list(ranks) for ranks in rank_lists if tuple(ranks) not in self._made]
        if missing:
            enumerate_groups: Any = dist.new_subgroups_by_enumeration  # torch leaves it untyped
            mine, _ = enumerate_groups(missing, group_desc=description)
            self.adopt(missing, mine)
        own = next((tuple(ranks) for ranks in rank_lists if self._rank in ranks), None)
        return None if own is None else self._made[own]
