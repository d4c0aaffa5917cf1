"""The faults of a campaign, dealt to trials in the order of its seed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from faults.deck import DAMAGES, Fault, phase_of, shuffle_faults


class Dealer:
    """Deals each fault until it has happened once.

    ``happened`` has the faults of earlier sessions under each launcher, which are left out. So
    faults that were dealt there without happening are dealt first.
    """

    def __init__(
        self, seed: int, happened: Mapping[str, Sequence[Fault]], *, with_disk: bool,
        is_chosen: Callable[[Fault], bool] = lambda fault: True,
    ) -> None:  # fmt: skip
        self._orders = {
            name: _leave_out(
                filter(is_chosen, shuffle_faults(seed, with_disk=with_disk, launcher=name)), faults
            )
            for name, faults in happened.items()
        }
        self._back: dict[str, deque[Fault]] = {name: deque() for name in happened}

    def deal(
        self, launcher: str, count: int, turn: int, busy: frozenset[str]
    ) -> tuple[str, list[Fault]]:
        """Faults for one run, and its variant, which is not a busy variant.

        Damage is late because it needs checkpoints. At most one fault is at the end of a run, and
        it is last.
        """
        passed: list[Fault] = []
        first = self._take(launcher)
        while not (free := [name for name in first.variants if name not in busy]):
            passed.append(first)
            first = self._take(launcher)
        variant = free[turn % len(free)]
        dealt = [first]
        while len(dealt) < count and len(passed) < 4 * count:
            fault = self._take(launcher)
            ends = phase_of(fault.phase).is_last and any(
                phase_of(other.phase).is_last for other in dealt
            )
            (dealt if variant in fault.variants and not ends else passed).append(fault)
        self.put_back(launcher, passed)
        return variant, sorted(
            dealt, key=lambda fault: (phase_of(fault.phase).is_last, fault.kind in DAMAGES)
        )

    def put_back(self, launcher: str, faults: Sequence[Fault]) -> None:
        """Put back faults that did not happen. They are dealt before new faults."""
        self._back[launcher].extend(faults)

    def _take(self, launcher: str) -> Fault:
        back = self._back[launcher]
        return back.popleft() if back else next(self._orders[launcher])


def _leave_out(order: Iterator[Fault], happened: Sequence[Fault]) -> Iterator[Fault]:
    left = Counter(happened)
    for fault in order:
        if left[fault] > 0:
            left[fault] -= 1
        else:
            yield fault
