"""Timing two callables in turns, and the table row of the result."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from timeit import Timer
from typing import Any

DISAGREES = "DISAGREES"
_IMPORT_TIMER = (
    "import time\nstart = time.perf_counter()\nimport {module}\nprint(time.perf_counter() - start)"
)


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        case: The measured operation, in a few words.
        ours_s: Our time in seconds, per call unless the case names another unit.
        peer: The other side, with its version if it has one.
        peer_s: The peer's time in seconds, measured in the same run.
        target: The ratio to reach, or None without a target.
        agreement: The results that were equal before the timing. Text that starts with
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
        """The peer's time over ours. NaN if nothing was timed."""
        return self.peer_s / self.ours_s if self.ours_s else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the target. None without a target."""
        return None if self.target is None else self.ratio >= self.target

    @property
    def agrees(self) -> bool:
        """Whether the results of both sides agreed."""
        return not self.agreement.startswith(DISAGREES)

    @classmethod
    def disagreement(cls, case: str, peer: str, difference: str) -> Row:
        """The row of a case that is not timed, because the results differ."""
        return cls(case, math.nan, peer, math.nan, agreement=f"{DISAGREES}: {difference}")


def compare(
    case: str, ours: Callable[[], Any], peer: str, theirs: Callable[[], Any],
    target: float | None = None, *, agreement: str, difference: object = "", number: int = 1,
    repeats: int = 7, calls: int = 1, note: str | Callable[[float, float], str] = "",
) -> Row:  # fmt: skip
    """The row of two callables, each of which makes so many ``calls``.

    ``difference`` describes results that are not equal: nothing is timed then. A ``note`` may be
    made of both times.
    """
    if difference:
        return Row.disagreement(case, peer, str(difference))
    ours_s, peer_s = (
        seconds / calls for seconds in paired(ours, theirs, number=number, repeats=repeats)
    )
    text = note if isinstance(note, str) else note(ours_s, peer_s)
    return Row(case, ours_s, peer, peer_s, target, agreement, text)


def paired(
    ours: Callable[[], Any], peer: Callable[[], Any], *, number: int, repeats: int = 7
) -> tuple[float, float]:
    """Seconds per call of both, each the minimum of its repeats.

    The repeats alternate: a machine that becomes slower affects both, and other work on it only
    adds time. Calls that start work on an accelerator must wait for it.
    """
    ours()
    peer()
    with _pause_collector():
        ours_s, peer_s = alternate(
            [partial(_time_batch, fn, number) for fn in (ours, peer)], repeats
        )
    return min(ours_s), min(peer_s)


def alternate(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """The results of each side in all rounds. Each round starts with another side."""
    results: list[list[float]] = [[] for _ in sides]
    for round_ in range(rounds):
        for offset in range(len(sides)):
            side = (round_ + offset) % len(sides)
            results[side].append(sides[side]())
    return results


def single(fn: Callable[[], Any], *, number: int, repeats: int = 7) -> float:
    """Seconds per call of one callable: the minimum of the repeats, after one untimed call."""
    fn()
    with _pause_collector():
        return min(_time_batch(fn, number) for _ in range(repeats))


def cpu_seconds(fn: Callable[[], Any], *, repeats: int = 3) -> float:
    """CPU time of a call on all threads, on which other processes have little effect."""
    return min(_time_batch(fn, 1, time.process_time) for _ in range(repeats))


def loop(function: Callable[..., Any], *arguments: Any, calls: int) -> Callable[[], float]:
    """Many calls in a separate loop: the interpreter specialises each loop for its callee."""
    names = [f"argument{index}" for index in range(len(arguments))]
    timer = Timer(
        f"function({', '.join(names)})",
        globals={"function": function, **dict(zip(names, arguments, strict=True))},
    )
    return lambda: timer.timeit(calls)


def compare_imports(
    ours: str, module: str, peer: str, target: float | None = None, *, repeats: int
) -> Row:
    """The row of two imports in new interpreters, which alternate. The first of each warms up."""

    def time_import(name: str) -> float:
        command = [sys.executable, "-I", "-W", "ignore", "-c", _IMPORT_TIMER.format(module=name)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(done.stdout.splitlines()[-1])

    times = alternate([partial(time_import, name) for name in (ours, module)], repeats + 1)
    ours_s, peer_s = (min(side[1:]) for side in times)
    note = "fresh processes, the import statement"
    return Row(f"import {ours}", ours_s, peer, peer_s, target, note=note)


def _time_batch(
    fn: Callable[[], Any], number: int, clock: Callable[[], float] | None = None
) -> float:
    """Seconds per call over one batch."""
    calls, clock = range(number), clock or time.perf_counter
    started_s = clock()
    for _ in calls:
        fn()
    return (clock() - started_s) / number


@contextmanager
def _pause_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
