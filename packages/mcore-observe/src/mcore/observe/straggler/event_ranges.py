"""Times ranges on an accelerator with pairs of events, and with the host's clock beside them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mcore.observe.straggler.event_pool import EventPool
from mcore.observe.straggler.timing import (
    DATA_KIND,
    UNTIMED,
    Entry,
    HostRanges,
    ThreadRanges,
)

__all__ = ["EventRanges", "make_ranges"]

_NS_PER_MS = 1e6


class EventRanges(HostRanges):
    """Times ranges with events on the current stream; a range lasts as long as the slower clock.

    Data ranges use the host's clock alone. Nothing waits but :meth:`take`. While a graph is being
    captured ranges are skipped and counted.

    Args:
        make_event: Returns an event that can time.
        is_capturing: Says whether the current stream is being captured into a graph.
        prefill: How many events to make when timing is switched on.
        sample_every: Time only each Nth entry of a kind, beginning with the first.
        now_ns: The host's clock.

    Attributes:
        dropped: Ranges timed with the host's clock alone, since all events were in use.
        skipped_capture: Ranges not timed since a graph was being captured.
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
            self.give_back([entry])
            return
        kind, began_ns, events = entry
        events[1].record()
        ranges.pairs.append((kind, ended_ns - (began_ns or 0), events))

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Let go of the events of ranges."""
        self._pool.give_back([events for _, _, events in entries if events is not None])

    def switched_on(self) -> None:
        """Make the first events."""
        self._pool.fill()

    def free(self) -> None:
        """Let go of the events that no range holds."""
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
            durations[kind].append(max(_elapsed_ms(begin, end) * _NS_PER_MS, host_ns or 0))
        for kind, durations_ns in durations.items():
            self._samples[kind].add(durations_ns)
        self.give_back(entries)


def _elapsed_ms(begin: Any, end: Any) -> float:
    """The time between two events; waits for those on another stream than the last one's."""
    try:
        elapsed: float = begin.elapsed_time(end)
    except RuntimeError:
        end.synchronize()
        elapsed = begin.elapsed_time(end)
    return elapsed


def make_ranges(device: torch.device, *, prefill: int, sample_every: int) -> HostRanges:
    """Choose how ranges are timed on a device.

    Args:
        device: The device that computes.
        prefill: How many events to make when timing is switched on.
        sample_every: Time only each Nth entry of a kind.

    Returns:
        Events and the host's clock on an accelerator, the host's clock alone on the CPU.

    Example:
        >>> type(make_ranges(torch.device("cpu"), prefill=8, sample_every=1)).__name__
        'HostRanges'
    """
    if device.type == "cpu":
        return HostRanges(sample_every=sample_every)
    return EventRanges(
        make_event=lambda: torch.Event(device, enable_timing=True),
        is_capturing=_capture_check(device),
        prefill=prefill,
        sample_every=sample_every,
    )


def _capture_check(device: torch.device) -> Callable[[], bool]:
    # Graphs are captured on the devices that torch.cuda serves; asking elsewhere raises an error.
    namespace = torch.get_device_module(device)
    return getattr(namespace, "is_current_stream_capturing", lambda: False)
