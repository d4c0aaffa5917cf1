"""Nested ranges of several threads timed with the host's clock: the hot path of the detector."""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

# Kinds of ranges are numbered like the section names: the built-in two first.
COMPUTE_KIND = 0
DATA_KIND = 1

# What an entry leaves on the stack: kind, when it began in ns of the host, and its events or None.
Entry: TypeAlias = "tuple[int, int, Any]"
# What an untimed entry leaves, so that each exit finds its own; recognised by identity.
UNTIMED: Entry = (COMPUTE_KIND, 0, None)
# A compute range that only the host's clock times leaves just its beginning: making and reading a
# tuple would take 7 % of the time of a range.
Opened: TypeAlias = "int | Entry"

NUM_KEPT = 1024  # samples that the median is taken over

_NS_PER_MS = 1e6
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class SectionStats:
    """How long the ranges of one section took on one rank.

    Attributes:
        count: Ranges that were timed; with ``sample_every`` N that is one in N entries.
        sum_ms: Their sum in ms, times ``sample_every``.
        median_ms: The median of the last 1024, in ms; NaN where none was timed.
        max_ms: The longest, in ms; NaN where none was timed.

    Example:
        >>> SectionStats(count=2, sum_ms=3.0, median_ms=1.5, max_ms=2.0).sum_ms
        3.0
    """

    count: int
    sum_ms: float
    median_ms: float
    max_ms: float


NO_STATS = SectionStats(0, 0.0, math.nan, math.nan)


class _Samples:
    """Count, sum and maximum of durations, and the last 1024 of them for the median."""

    __slots__ = ("_count", "_last_ns", "_max_ns", "_sum_ns")

    def __init__(self) -> None:
        self._count = 0
        self._sum_ns: float = 0
        self._max_ns: float = 0
        self._last_ns: deque[float] = deque(maxlen=NUM_KEPT)

    def add(self, durations_ns: Sequence[float]) -> None:
        """Take in durations in nanoseconds, oldest first."""
        if durations_ns:
            self._count += len(durations_ns)
            self._sum_ns += sum(durations_ns)
            self._max_ns = max(self._max_ns, *durations_ns)
            self._last_ns.extend(durations_ns)

    def stats(self, scale: int) -> SectionStats:
        """Return the statistics, with the sum multiplied by ``scale``."""
        if not self._count:
            return NO_STATS
        return SectionStats(
            count=self._count,
            sum_ms=self._sum_ns * scale / _NS_PER_MS,
            median_ms=statistics.median(self._last_ns) / _NS_PER_MS,
            max_ms=self._max_ns / _NS_PER_MS,
        )


class ThreadRanges:
    """The ranges of one thread. Only that thread writes; the reporting thread takes samples."""

    __slots__ = ("__weakref__", "compute", "entries", "mark", "pairs", "pending", "stack")

    def __init__(self) -> None:
        self.mark = COMPUTE_KIND  # the kind of the next entry
        self.stack: list[Opened] = []
        self.pending: list[list[float]] = [[], []]  # ns by kind
        self.compute = self.pending[COMPUTE_KIND]  # looked up a little faster
        self.pairs: list[Entry] = []  # kind, ns that the host took, events to be read
        self.entries: defaultdict[int, int] = defaultdict(int)

    def make_room(self, kind: int) -> None:
        """Make sure that there is a list of samples for a kind."""
        while len(self.pending) <= kind:
            self.pending.append([])


class _Token:
    """Lives as long as the thread whose local storage holds it."""

    __slots__ = ("__weakref__",)


class _Local(threading.local):
    """The ranges of the current thread, made and announced at its first use."""

    def __init__(self, announce: Callable[[ThreadRanges, _Token], None]) -> None:
        self.ranges = ThreadRanges()
        self._token = _Token()
        announce(self.ranges, self._token)


class HostRanges:
    """Times ranges with the host's clock; ``sample_every`` N times every Nth entry of a kind."""

    def __init__(
        self, *, sample_every: int = 1, now_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._every = sample_every
        self._lock = threading.Lock()
        self._threads: list[tuple[ThreadRanges, weakref.ref[_Token]]] = []
        self._samples: defaultdict[int, _Samples] = defaultdict(_Samples)
        self.now_ns = now_ns
        self.local = _Local(self._announce)
        self.has_begin = sample_every != 1  # whether an entry takes more than reading the clock
        self.dropped = 0  # ranges timed with the host's clock for want of events
        self.skipped_capture = 0  # ranges not timed since a graph was being captured

    def begin(self, ranges: ThreadRanges, kind: int) -> Entry:
        """Return what an entry leaves on the stack of its thread."""
        return (kind, self.now_ns(), None) if self._is_due(ranges, kind) else UNTIMED

    def end(self, ranges: ThreadRanges, entry: Entry, ended_ns: int) -> None:
        """Close a range that has events; here there are none."""

    def add(self, ranges: ThreadRanges, kind: int, duration_ns: int) -> None:
        """Keep the time that a range took on the host's clock."""
        pending = ranges.pending[kind]
        pending.append(duration_ns)
        if len(pending) >= NUM_KEPT:
            self.fold(kind, pending)

    def drop(self, entries: Sequence[Entry]) -> None:
        """Discard ranges whose time is not kept."""

    def fold(self, kind: int, pending: list[float]) -> None:
        """Fold the samples of a thread into the aggregates."""
        with self._lock:
            self._samples[kind].add(_take_all(pending))

    def has_open(self) -> bool:
        """Return whether any thread is inside a range."""
        with self._lock:
            return any(ranges.stack for ranges, _ in self._threads)

    def take(self) -> dict[int, SectionStats]:
        """Return the statistics of the ranges closed since the last call, by kind.

        Ranges that are still open come with a later call. Waits for events, where there are any.
        """
        with self._lock:
            for ranges, _ in self._threads:
                self._read_events(_take_all(ranges.pairs))
                for kind, pending in enumerate(ranges.pending):
                    if pending:
                        self._samples[kind].add(_take_all(pending))
            self._drop_ended_threads()
            samples, self._samples = self._samples, defaultdict(_Samples)
        return {kind: of_kind.stats(self._every) for kind, of_kind in samples.items()}

    def reset(self) -> None:
        """Drop all samples, without waiting. Open ranges stay open."""
        with self._lock:
            for ranges, _ in self._threads:
                self.drop(_take_all(ranges.pairs))
                for pending in ranges.pending:
                    _take_all(pending)
            self._drop_ended_threads()
            self._samples.clear()

    def clear_marks(self) -> None:
        """Forget what the next entry of each thread is."""
        with self._lock:
            for ranges, _ in self._threads:
                ranges.mark = COMPUTE_KIND

    def switched_on(self) -> None:
        """Get ready for timing."""

    def free(self) -> None:
        """Release what timing needs; it is made again when needed."""

    def _is_due(self, ranges: ThreadRanges, kind: int) -> bool:
        entry = ranges.entries[kind]
        ranges.entries[kind] = entry + 1
        return entry % self._every == 0

    def _announce(self, ranges: ThreadRanges, token: _Token) -> None:
        with self._lock:
            self._threads.append((ranges, weakref.ref(token)))

    def _drop_ended_threads(self) -> None:
        self._threads = [
            (ranges, token)
            for ranges, token in self._threads
            if token() is not None or ranges.pairs or any(ranges.pending)
        ]

    def _read_events(self, entries: list[Entry]) -> None:
        """Turn ranges with events into samples."""


def _take_all(items: list[_Item]) -> list[_Item]:
    """Empty a list that another thread may be appending to, losing nothing."""
    taken = items[:]
    del items[: len(taken)]
    return taken
