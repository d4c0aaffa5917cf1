"""Times nested ranges of several threads with the host's clock: the hot path of the detector."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

from mcore.observe.straggler.samples import NUM_KEPT, Samples
from mcore.observe.straggler.section_stats import SectionStats

__all__ = [
    "COMPUTE_KIND",
    "DATA_KIND",
    "UNTIMED",
    "Entry",
    "HostRanges",
    "Opened",
    "ThreadRanges",
    "take_all",
]

# Kinds of ranges are numbered like the section names: the built-in two first.
COMPUTE_KIND = 0
DATA_KIND = 1

# What an entry leaves on the stack, also one that is not timed, so that each exit finds its own:
# kind, when it began in ns of the host, and its events; None where there is no such thing.
Entry: TypeAlias = "tuple[int, int | None, Any]"
UNTIMED: Entry = (COMPUTE_KIND, None, None)
# A compute range that the host's clock alone times leaves when it began and no more: making and
# reading a tuple would take 7 % of the time of a range.
Opened: TypeAlias = "int | Entry"

_Item = TypeVar("_Item")


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
        """Have a list of samples for a kind."""
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
    """Times ranges with the host's clock: what is behind the entries and exits of a switch.

    Args:
        sample_every: Time only each Nth entry of a kind, beginning with the first.
        now_ns: The clock.

    Attributes:
        now_ns: The clock.
        local: The ranges of the current thread, as ``local.ranges``.
        has_begin: Whether an entry takes more than reading the clock.
        dropped: Ranges timed with the host's clock for want of events; here always 0.
        skipped_capture: Ranges not timed since a graph was being captured; here always 0.

    Example:
        >>> ranges = HostRanges()
        >>> ranges.local.ranges.pending[COMPUTE_KIND].append(5_000_000)
        >>> ranges.take()[COMPUTE_KIND].sum_ms
        5.0
    """

    def __init__(
        self, *, sample_every: int = 1, now_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._every = sample_every
        self._lock = threading.Lock()
        self._threads: list[tuple[ThreadRanges, weakref.ref[_Token]]] = []
        self._samples: defaultdict[int, Samples] = defaultdict(Samples)
        self.now_ns = now_ns
        self.local = _Local(self._announce)
        self.has_begin = sample_every != 1
        self.dropped = 0
        self.skipped_capture = 0

    def begin(self, ranges: ThreadRanges, kind: int) -> Entry:
        """Return what an entry leaves on the stack of its thread."""
        return (kind, self.now_ns(), None) if self._is_due(ranges, kind) else UNTIMED

    def end(self, ranges: ThreadRanges, entry: Entry, ended_ns: int) -> None:
        """Close a range that has events; here there are none."""

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Let go of the events of ranges; here there are none."""

    def add(self, ranges: ThreadRanges, kind: int, duration_ns: int) -> None:
        """Take in a range of the host's clock."""
        pending = ranges.pending[kind]
        pending.append(duration_ns)
        if len(pending) >= NUM_KEPT:
            self.fold(kind, pending)

    def fold(self, kind: int, pending: list[float]) -> None:
        """Take the samples of a thread into the aggregates."""
        with self._lock:
            self._samples[kind].add(take_all(pending))

    def has_open(self) -> bool:
        """Say whether any thread is inside a range."""
        with self._lock:
            return any(ranges.stack for ranges, _ in self._threads)

    def take(self) -> dict[int, SectionStats]:
        """Return the statistics of the ranges closed since the last call, by kind.

        Ranges that are still open come with a later call. Waits for events, where there are any.
        """
        with self._lock:
            for ranges, _ in self._threads:
                self._read_events(take_all(ranges.pairs))
                for kind, pending in enumerate(ranges.pending):
                    if pending:
                        self._samples[kind].add(take_all(pending))
            self._drop_ended_threads()
            samples, self._samples = self._samples, defaultdict(Samples)
        return {kind: of_kind.stats(self._every) for kind, of_kind in samples.items()}

    def reset(self) -> None:
        """Drop all samples, without waiting. Open ranges stay open."""
        with self._lock:
            for ranges, _ in self._threads:
                self.give_back(take_all(ranges.pairs))
                for pending in ranges.pending:
                    take_all(pending)
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
        """Let go of what timing needs; it is made again when it is needed."""

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


def take_all(items: list[_Item]) -> list[_Item]:
    """Empty a list that another thread may be appending to, losing nothing.

    Example:
        >>> items = [1, 2]
        >>> take_all(items), items
        ([1, 2], [])
    """
    taken = items[:]
    del items[: len(taken)]
    return taken
