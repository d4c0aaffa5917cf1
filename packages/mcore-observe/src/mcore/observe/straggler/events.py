"""Ranges of an accelerator timed with pairs of events, and with the host's clock alongside."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from mcore.observe.straggler.ranges import (
    DATA_KIND,
    UNTIMED,
    Entry,
    HostRanges,
    ThreadRanges,
)

_MIN_CAPACITY = 65536  # events; a larger prefill raises the limit
_NS_PER_MS = 1e6


class _TimingEvent(Protocol):
    """The part of ``torch.Event(device, enable_timing=True)`` that is used."""

    def record(self) -> Any: ...
    def synchronize(self) -> Any: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


_EventPair: TypeAlias = "tuple[_TimingEvent, _TimingEvent]"


class EventPool:
    """Hands out pairs of events and takes them back. Any thread may use it.

    It never makes more events than the larger of ``prefill`` and 65536.
    """

    def __init__(self, make_event: Callable[[], Any], *, prefill: int) -> None:
        self._make_event = make_event
        self._prefill = prefill
        self._capacity = max(prefill, _MIN_CAPACITY)
        self._lock = threading.Lock()
        self._free: list[_EventPair] = []
        self.num_made = 0

    def fill(self) -> None:
        """Make events until there are ``prefill``."""
        with self._lock:
            while self.num_made < self._prefill:
                self._free.append(self._new_pair())

    def take(self) -> _EventPair | None:
        """Return a pair, or None if all that may exist are in use."""
        try:
            return self._free.pop()
        except IndexError:
            with self._lock:
                return self._new_pair() if self.num_made + 2 <= self._capacity else None

    def give_back(self, pairs: Iterable[_EventPair]) -> None:
        """Take pairs back."""
        self._free.extend(pairs)

    def clear(self) -> None:
        """Release the events that nobody uses."""
        with self._lock:
            free, self._free = self._free, []
            self.num_made -= 2 * len(free)

    def _new_pair(self) -> _EventPair:
        self.num_made += 2
        return self._make_event(), self._make_event()


class EventRanges(HostRanges):
    """Times ranges with events on the current stream; a range lasts as long as the slower clock.

    Data ranges use the host's clock alone. Only :meth:`take` waits. While a graph is being
    captured ranges are skipped and counted.
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
        """Record the first event of a range, and return what its entry leaves on the stack."""
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
        """Discard ranges whose time is not kept: their events can be reused."""
        self._pool.give_back([events for _, _, events in entries if events is not None])

    def switched_on(self) -> None:
        """Make the first events."""
        self._pool.fill()

    def free(self) -> None:
        """Release the events that no range holds."""
        self._pool.clear()

    def _count_capture(self) -> None:
        with self._lock:
            self.skipped_capture += 1

    def _read_events(self, entries: list[Entry]) -> None:
        if entries:
            _, _, (_, last) = entries[-1]
            last.synchronize()
        durations: defaultdict[int, list[float]] = defaultdict(list)
        for kind, host_ns, (begin, end) in entries:
            durations[kind].append(max(_elapsed_ms(begin, end) * _NS_PER_MS, host_ns))
        for kind, durations_ns in durations.items():
            self._samples[kind].add(durations_ns)
        self.drop(entries)


def _elapsed_ms(begin: Any, end: Any) -> float:
    """Return the time between two events; wait for those on a stream other than the last one's."""
    try:
        elapsed: float = begin.elapsed_time(end)
    except RuntimeError:
        end.synchronize()
        elapsed = begin.elapsed_time(end)
    return elapsed


def make_ranges(device: torch.device, *, prefill: int, sample_every: int) -> HostRanges:
    """Return what times ranges on a device: events on an accelerator, else the host's clock."""
    if device.type == "cpu":
        return HostRanges(sample_every=sample_every)
    # Graphs are captured on the devices that torch.cuda serves; asking elsewhere raises an error.
    namespace = torch.get_device_module(device)
    return EventRanges(
        make_event=lambda: torch.Event(device, enable_timing=True),
        is_capturing=getattr(namespace, "is_current_stream_capturing", lambda: False),
        prefill=prefill,
        sample_every=sample_every,
    )
