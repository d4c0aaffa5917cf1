"""Seconds, memory and bytes of one item at several numbers of ranks, and the growth of the time."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from math import log, nan
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

_NUM_FITTED = 4  # the last sizes
_LIMIT_S = 3600


class Cost(NamedTuple):
    """The cost of one role, such as the busiest rank or a common one."""

    ranks: int
    role: str
    seconds: float
    peak_bytes: int
    sent_bytes: int


class Meter:
    """Measures the roles of one item at one number of ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent_bytes = ranks, 0
        self.costs: list[Cost] = []

    @contextmanager
    def role(self, name: str) -> Iterator[None]:
        """Measure the block. ``sent_bytes`` is the part of the role that it leaves there."""
        gc.collect()
        self.sent_bytes = 0
        # Linux resets the highest memory of a process to the present one.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, began = _read_memory("VmRSS"), time.process_time()
        yield
        seconds = time.process_time() - began
        peak = max(0, _read_memory("VmHWM") - before)
        self.costs.append(Cost(self.ranks, name, seconds, peak, self.sent_bytes))


Item = Callable[[Meter], None]


def measure(item: Item, sizes: Sequence[int], *, forks: bool = True) -> list[Cost]:
    """Measure an item at each number of ranks, each in a separate forked process.

    Without ``forks`` in this process, for an item whose ranks are processes: a forked process could
    not use the server that this one starts ranks with.
    """
    if not forks:
        return [cost for ranks in sizes for cost in _measure_once(item, ranks)]
    context = multiprocessing.get_context("fork")
    costs = []
    for ranks in sizes:
        # The memory of one size must not hide the need of the next, nor that of visited objects.
        with ProcessPoolExecutor(1, mp_context=context, initializer=gc.freeze) as pool:
            costs += pool.submit(_measure_once, item, ranks).result(_LIMIT_S)
    return costs


def fit_exponent(costs: Sequence[Cost]) -> float:
    """Return p of ``seconds ~ ranks ** p`` by least squares over the last sizes of one role."""
    last = [cost for cost in costs if cost.seconds > 0][-_NUM_FITTED:]
    if len(last) < 2:
        return nan
    points = [log(cost.ranks) for cost in last], [log(cost.seconds) for cost in last]
    return linear_regression(*points).slope


def _measure_once(item: Item, ranks: int) -> list[Cost]:
    meter = Meter(ranks)
    item(meter)
    return meter.costs


def _read_memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
