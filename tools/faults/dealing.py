"""The faults of a campaign, dealt to trials in the order of its seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from faults.deck import DAMAGES, Fault, phase_of, shuffled


@dataclass
class _Pile:
    """The faults of one launcher: those to come, and those that were drawn but did not happen."""

    order: Iterator[Fault]
    back: deque[Fault] = field(default_factory=deque)
    drawn: int = 0

    def take(self) -> Fault:
        if self.back:
            return self.back.popleft()
        self.drawn += 1
        return next(self.order)


class Dealer:
    """Hands out each fault once, however many trials it takes until it happens."""

    def __init__(
        self,
        seed: int,
        launchers: Sequence[str],
        *,
        with_disk: bool,
        chosen: Callable[[Fault], bool],
    ) -> None:
        self._piles = {
            name: _Pile(filter(chosen, shuffled(seed, with_disk=with_disk, launcher=name)))
            for name in launchers
        }

    def drawn(self, launcher: str) -> int:
        """How many faults of a launcher were drawn, those given back included."""
        return self._piles[launcher].drawn

    def go_on_behind(self, launcher: str, drawn: int, happened: Sequence[Fault]) -> None:
        """Draw what an earlier campaign has drawn; what did not happen in it comes first."""
        pile, left = self._piles[launcher], list(happened)
        while pile.drawn < drawn:
            pile.drawn += 1
            fault = next(pile.order)
            if fault in left:
                left.remove(fault)
            else:
                pile.back.append(fault)

    def deal(
        self, launcher: str, count: int, turn: int, busy: frozenset[str]
    ) -> tuple[str, list[Fault]]:
        """Take faults that one run may have, and its variant, which is none of the busy ones.

        Damage comes late, as it needs checkpoints; those at the end of a run, one of them, last.
        """
        pile = self._piles[launcher]
        passed: list[Fault] = []
        first = pile.take()
        while not (free := [name for name in first.variants if name not in busy]):
            passed.append(first)
            first = pile.take()
        variant = free[turn % len(free)]
        dealt = [first]
        while len(dealt) < count and len(passed) < 4 * count:
            fault = pile.take()
            ends = phase_of(fault.phase).is_last and any(
                phase_of(other.phase).is_last for other in dealt
            )
            (dealt if variant in fault.variants and not ends else passed).append(fault)
        pile.back.extend(passed)
        return variant, sorted(
            dealt, key=lambda fault: (phase_of(fault.phase).is_last, fault.kind in DAMAGES)
        )

    def give_back(self, launcher: str, faults: Sequence[Fault]) -> None:
        """Take what did not happen; it comes before new ones."""
        self._piles[launcher].back.extend(faults)
