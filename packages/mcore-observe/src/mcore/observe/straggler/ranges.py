"""Nested ranges of several threads, timed with the host's clock and on accelerators with events.

This is the hot path of the detector: a range costs training less than a microsecond on the CPU.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from mcore.tensor.device import capture_query

# Kinds of ranges are numbered like the section names: the built-in two first.
COMPUTE_KIND = 0
DATA_KIND = 1

# An open range on the stack: kind, beginning in ns of the host, and its events or None.
Entry: TypeAlias = "tuple[int, int, Any]"
# The stack has an entry for an untimed range, too: each exit removes one. Recognised by identity.
UNTIMED: Entry = (COMPUTE_KIND, 0, None)
# A compute range timed only by the host's clock is just its beginning on the stack: a tuple would
# take 7 % of the time of a range.
Opened: TypeAlias = "int | Entry"

NUM_KEPT = 1024  # samples for the median
_MIN_CAPACITY = 65536  # events; a larger prefill raises the limit

_NS_PER_MS = 1e6
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class SectionStats:
    """Times of the ranges of one section on one rank.

    Attributes:
        count: Ranges that were timed: with ``sample_every`` N, every Nth.
        sum_ms: The sum of their times in ms, multiplied by ``sample_every``.
        median_ms: The median of the last 1024, in ms. NaN without a range.
        max_ms: The longest, in ms. NaN without a range.

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
        """Add durations in nanoseconds, oldest first."""
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
    """The ranges of one thread. Only that thread writes. The reporting thread removes samples."""

    __slots__ = ("__weakref__", "compute", "entries", "mark", "pairs", "pending", "stack")

    def __init__(self) -> None:
        self.mark = COMPUTE_KIND  # the kind of the next entry
        self.stack: list[Opened] = []
        self.pending: list[list[float]] = [[], []]  # ns by kind
        self.compute = self.pending[COMPUTE_KIND]  # saves the hot path a look-up
        self.pairs: list[Entry] = []  # kind, ns of the host, events to be read
        self.entries: defaultdict[int, int] = defaultdict(int)

    def make_room(self, kind: int) -> None:
        """Make sure that there is a list of samples for a kind."""
        while len(self.pending) <= kind:
            self.pending.append([])


class _Token:
    """Lives as long as its thread: only the local storage of the thread refers to it."""

    __slots__ = ("__weakref__",)


class _Local(threading.local):
    """The ranges of the current thread. They are made and announced at the first use."""

    def __init__(self, announce: Callable[[ThreadRanges, _Token], None]) -> None:
        self.ranges = ThreadRanges()
        self._token = _Token()
        announce(self.ranges, self._token)


class HostRanges:
    """Times ranges with the host's clock: with ``sample_every`` N, every Nth entry of a kind."""

    def __init__(
        self, *, sample_every: int = 1, now_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._every = sample_every
        self._lock = threading.Lock()
        self._threads: list[tuple[ThreadRanges, weakref.ref[_Token]]] = []
        self._samples: defaultdict[int, _Samples] = defaultdict(_Samples)
        self.now_ns = now_ns
        self.local = _Local(self._add_thread)
        self.has_begin = sample_every != 1  # whether an entry needs more than reading the clock
        self.dropped = 0  # ranges timed only by the host's clock because all events were in use
        self.skipped_capture = 0  # ranges not timed because a graph was being captured

    def begin(self, ranges: ThreadRanges, kind: int) -> Entry:
        """Return the entry of a range for the stack of its thread."""
        return (kind, self.now_ns(), None) if self._is_due(ranges, kind) else UNTIMED

    def end(self, ranges: ThreadRanges, entry: Entry, ended_ns: int) -> None:
        """Close a range that has events. Here there are none."""

    def add(self, ranges: ThreadRanges, kind: int, duration_ns: int) -> None:
        """Keep the time of a range on the host's clock."""
        pending = ranges.pending[kind]
        pending.append(duration_ns)
        if len(pending) >= NUM_KEPT:
            self.fold(kind, pending)

    def drop(self, entries: Sequence[Entry]) -> None:
        """Discard ranges without keeping their times."""

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

        Ranges that are still open are returned by a later call. Waits for events, if there are any.
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
        """Make the next entry of each thread a compute range."""
        with self._lock:
            for ranges, _ in self._threads:
                ranges.mark = COMPUTE_KIND

    def switched_on(self) -> None:
        """Prepare for timing."""

    def free(self) -> None:
        """Release resources for timing. They are made when needed."""

    def _is_due(self, ranges: ThreadRanges, kind: int) -> bool:
        entry = ranges.entries[kind]
        ranges.entries[kind] = entry + 1
        return entry % self._every == 0

    def _add_thread(self, ranges: ThreadRanges, token: _Token) -> None:
        with self._lock:
            self._threads.append((ranges, weakref.ref(token)))

    def _drop_ended_threads(self) -> None:
        # The token of an ended thread is gone, but its samples may not have been reported yet.
        self._threads = [
            (ranges, token)
            for ranges, token in self._threads
            if token() is not None or ranges.pairs or any(ranges.pending)
        ]

    def _read_events(self, entries: list[Entry]) -> None:
        """Turn ranges that have events into samples."""


def _take_all(items: list[_Item]) -> list[_Item]:
    """Empty a list to which another thread may be appending, without losing an item."""
    # Both operations are atomic, and an item appended between them stays for the next call.
    taken = items[:]
    del items[: len(taken)]
    return taken


class EventPool:
    """Pairs of events for reuse. Any thread may call it.

    It makes at most ``prefill`` or 65536 events, if that is more.
    """

    def __init__(self, make_event: Callable[[], Any], *, prefill: int) -> None:
        self._make_event = make_event
        self._prefill = prefill
        self._capacity = max(prefill, _MIN_CAPACITY)
        self._lock = threading.Lock()
        self._free: list[tuple[Any, Any]] = []
        self.num_made = 0

    def fill(self) -> None:
        """Make events until there are ``prefill``."""
        with self._lock:
            while self.num_made < self._prefill:
                self._free.append(self._make_pair())

    def take(self) -> tuple[Any, Any] | None:
        """Return a pair, or None if all events are in use."""
        try:
            return self._free.pop()
        except IndexError:
            with self._lock:
                return self._make_pair() if self.num_made + 2 <= self._capacity else None

    def give_back(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Take pairs back."""
        self._free.extend(pairs)

    def clear(self) -> None:
        """Release the events that are not in use."""
        with self._lock:
            free, self._free = self._free, []
            self.num_made -= 2 * len(free)

    def _make_pair(self) -> tuple[Any, Any]:
        self.num_made += 2
        return self._make_event(), self._make_event()


class EventRanges(HostRanges):
    """Times ranges with events on the current stream and the host's clock: the longer time counts.

    Data ranges use only the host's clock. Only :meth:`take` waits. While a graph is being captured,
    ranges are skipped and counted.
    """

    def __init__(
        self,
        *,
        make_event: Callable[[], Any],
        is_capturing: Callable[[], bool],
        prefill: int,
        sample_every: int = 1,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(sample_every=sample_every, now_ns=now_ns)
        self._pool = EventPool(make_event, prefill=prefill)
        self._is_capturing = is_capturing
        self.has_begin = True

    def begin(self, ranges: ThreadRanges, kind: int) -> Entry:
        """Record the first event of a range. Return the entry of the range for the stack."""
        if self._every != 1 and not self._is_due(ranges, kind):
            return UNTIMED
        if kind == DATA_KIND:
            return kind, self.now_ns(), None
        if self._is_capturing():
            self._count_capture()
            return UNTIMED
        events = self._pool.take()
        if events is None:
            with self._lock:
                self.dropped += 1
        else:
            events[0].record()
        return kind, self.now_ns(), events

    def end(self, ranges: ThreadRanges, entry: Entry, ended_ns: int) -> None:
        """Record the second event of a range, without waiting."""
        if self._is_capturing():
            self._count_capture()
            self.drop([entry])
            return
        kind, began_ns, events = entry
        events[1].record()
        ranges.pairs.append((kind, ended_ns - began_ns, events))

    def drop(self, entries: Sequence[Entry]) -> None:
        """Discard ranges without keeping their times. Their events can be reused."""
        self._pool.give_back([events for _, _, events in entries if events is not None])

    def switched_on(self) -> None:
        """Make the first events."""
        self._pool.fill()

    def free(self) -> None:
        """Release the events that are not in use."""
        self._pool.clear()

    def _count_capture(self) -> None:
        with self._lock:
            self.skipped_capture += 1

    def _read_events(self, entries: list[Entry]) -> None:
        if entries:
            # Events of a stream are done in their order, so waiting for the last is enough.
            _, _, (_, last) = entries[-1]
            last.synchronize()
        durations: defaultdict[int, list[float]] = defaultdict(list)
        for kind, host_ns, (begin, end) in entries:
            try:
                elapsed_ms = begin.elapsed_time(end)
            except RuntimeError:  # not done: recorded on other streams than the last event
                begin.synchronize()
                end.synchronize()
                elapsed_ms = begin.elapsed_time(end)
            durations[kind].append(max(elapsed_ms * _NS_PER_MS, host_ns))
        for kind, durations_ns in durations.items():
            self._samples[kind].add(durations_ns)
        self.drop(entries)


def make_ranges(device: torch.device, *, prefill: int, sample_every: int) -> HostRanges:
    """Return the timer for a device: events on an accelerator, the host's clock on the CPU."""
    if device.type == "cpu":
        return HostRanges(sample_every=sample_every)
    return EventRanges(
        make_event=lambda: torch.Event(device, enable_timing=True),
        is_capturing=capture_query(device),
        prefill=prefill,
        sample_every=sample_every,
    )
