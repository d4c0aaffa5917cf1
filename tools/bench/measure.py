"""Timing two callables side by side, and the row of a table that results from it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DISAGREES = "DISAGREES"


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        case: What is measured, in a few words.
        ours_s: Our time in seconds, per call unless the case says otherwise.
        peer: What ours is compared with, with its version where it has one.
        peer_s: The peer's time in seconds, measured in the same run.
        target: The ratio to reach, or None where there is only a figure to know.
        agreement: What was checked to be equal before the timing; text that starts with
            ``DISAGREES`` makes the row an error.
        note: Anything that a reader needs to judge the figures.
    """

    case: str
    ours_s: float
    peer: str
    peer_s: float
    target: float | None = None
    agreement: str = ""
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times faster ours is: the peer's time over ours; NaN where nothing was timed."""
        return self.peer_s / self.ours_s if self.ours_s else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the target; None where there is no target."""
        return None if self.target is None else self.ratio >= self.target

    @property
    def agrees(self) -> bool:
        """Whether the results of both sides agreed."""
        return not self.agreement.startswith(DISAGREES)

    @classmethod
    def disagreement(cls, case: str, peer: str, what: str) -> Row:
        """The row of a case that is not timed, since the results differ."""
        return cls(case, math.nan, peer, math.nan, agreement=f"{DISAGREES}: {what}")


def paired(
    ours: Callable[[], Any], peer: Callable[[], Any], *, number: int, repeats: int = 7
) -> tuple[float, float]:
    """Seconds per call of both, each the minimum of its repeats.

    The repeats alternate, so that a machine that becomes slower does so for both, and other work
    on it only adds time. Calls that start work on an accelerator have to wait for it themselves.
    """
    _check_counts(number, repeats)
    ours()
    peer()
    ours_s, peer_s = math.inf, math.inf
    with _collector_at_rest():
        for round_ in range(repeats):
            if round_ % 2:
                peer_s = min(peer_s, _once(peer, number))
                ours_s = min(ours_s, _once(ours, number))
            else:
                ours_s = min(ours_s, _once(ours, number))
                peer_s = min(peer_s, _once(peer, number))
    return ours_s, peer_s


def single(fn: Callable[[], Any], *, number: int, repeats: int = 7) -> float:
    """Seconds per call of one callable: the minimum of the repeats, after one untimed call."""
    _check_counts(number, repeats)
    fn()
    with _collector_at_rest():
        return min(_once(fn, number) for _ in range(repeats))


def _once(fn: Callable[[], Any], number: int) -> float:
    """Seconds per call over one batch."""
    calls = range(number)
    started_s = time.perf_counter()
    for _ in calls:
        fn()
    return (time.perf_counter() - started_s) / number


def _check_counts(number: int, repeats: int) -> None:
    for name, value in (("number", number), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}; at least 1 is needed to time anything")


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
