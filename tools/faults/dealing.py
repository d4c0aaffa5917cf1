"""The faults of a campaign, dealt to trials in the order of its seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from faults.deck import DAMAGES, Fault, phase_of, shuffle_faults


@dataclass
class _Pile:
    """The faults of one launcher: the order to come, and drawn faults that did not happen."""

    order: Iterator[Fault]
    back: deque[Fault] = field(default_factory=deque)
    drawn: int = 0

    def take(self) -> Fault:
        if self.back:
            return self.back.popleft()
        self.drawn += 1
        return next(self.order)


class Dealer:
    """Deals each fault until it has happened once."""

    def __init__(
        self,
        seed: int,
        launchers: Sequence[str],
        *,
        with_disk: bool,
        is_chosen: Callable[[Fault], bool],
    ) -> None:
        self._piles = {
            name: _Pile(filter(is_chosen, shuffle_faults(seed, with_disk=with_disk, launcher=name)))
            for name in launchers
        }

    def count_drawn(self, launcher: str) -> int:
        """The number of faults drawn for a launcher, including those that were put back."""
        return self._piles[launcher].drawn

    def replay(self, launcher: str, drawn: int, happened: Sequence[Fault]) -> None:
        """Draw the faults of an earlier session. Those that did not happen are dealt first."""
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
        """Faults for one run, and its variant, which is not a busy variant.

        Damage is late because it needs checkpoints. At most one fault is at the end of a run, and
        it is last.
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

    def put_back(self, launcher: str, faults: Sequence[Fault]) -> None:
        """Put back faults that did not happen. They are dealt before new faults."""
        self._piles[launcher].back.extend(faults)
