"""Streams and events with logical clocks, and the memory that each of them may read.

Ops run at once, so memory always has its last content. A stream that has not waited for the writer
of a range reads poison there instead: bytes 0xFF, which are NaN in every floating-point format. A
stream that writes a range must have waited for its readers and writers. Copies that the host has
not waited for leave poison in their destination on the host.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from standin import recording
from standin.guard import current_index, set_current_index
from standin.memory import NAME, is_device

Key = tuple[int, int]  # index of the device, number of the stream
Tensors = Sequence[torch.Tensor]
Access = tuple[int, int, Key, int, bool]  # first byte, end, stream, launch, and if it writes
HOST: Key = (-1, 0)
POISON = 0xFF


class RaceError(RuntimeError):
    """Memory was changed while a stream could still read it."""


class Clocks:
    """Which launches of each stream the other streams and the host have waited for."""

    def __init__(self) -> None:
        self.views: defaultdict[Key, dict[Key, int]] = defaultdict(dict)
        # The latest accesses to each storage. The lists are replaced, never changed.
        self.accesses: dict[int, list[Access]] = {}
        self._pending: list[tuple[Key, int, Callable[[], object]]] = []
        self._lock = threading.RLock()  # never held while work runs or is waited for

    def launch(self, key: Key) -> int:
        """Return the number of a new launch on a stream, which follows all that the host saw."""
        with self._lock:
            self.wait(key, self.views[HOST])
            self.views[key][key] = self.views[key].get(key, 0) + 1
            return self.views[key][key]

    def run(self, key: Key, read: Tensors, written: Tensors, work: Callable[[], Any]) -> Any:
        """Run work as the next launch of a stream, and return its result.

        What the stream may not read is poison for the work.
        """
        number = self.launch(key)
        for tensor in written:
            if self._find_unseen(key, tensor):
                line = f"{tuple(tensor.shape)} is changed at {recording.find_line()}"
                raise RaceError(f"{line} while another stream may still use it: wait for its work")
        unseen = [
            (low, ctypes.string_at(low, high - low))
            for tensor in read
            for low, high, is_write in self._find_unseen(key, tensor)
            if is_write
        ]
        for low, content in unseen:
            ctypes.memset(low, POISON, len(content))
        result = work()
        for low, content in unseen:
            ctypes.memmove(low, content, len(content))
        for tensor in read:
            self._note(tensor, key, number, is_write=False)
        known = set(map(id, read))
        made = [one for one in filter(is_device, tree_leaves(result)) if id(one) not in known]
        for tensor in (*written, *made):
            self._note(tensor, key, number, is_write=True)
        return result

    def wait(self, key: Key, view: dict[Key, int]) -> None:
        """Let a stream or the host wait for a view."""
        with self._lock:
            known = self.views[key]
            known.update([one for one in view.items() if one[1] > known.get(one[0], 0)])
            items = self._pending if key == HOST else ()
            done = [item for item in items if self.has_seen(HOST, *item[:2])]
        for _, _, finish in done:
            finish()  # a second thread that needs it waits here for the first
        with self._lock:
            self._pending = [item for item in self._pending if item not in done]

    def has_seen(self, viewer: Key, key: Key, number: int) -> bool:
        """Return whether a stream or the host has waited for a launch."""
        return viewer == key or self.views[viewer].get(key, 0) >= number

    def when_host_waits(self, key: Key, finish: Callable[[], object]) -> None:
        """Call a function as soon as the host has waited for the latest launch of a stream."""
        with self._lock:
            self._pending.append((key, self.views[key][key], run_once(finish)))

    def _note(self, tensor: torch.Tensor, key: Key, number: int, *, is_write: bool) -> None:
        (start, end), base = find_range(tensor), tensor.untyped_storage().data_ptr()
        # A write replaces all before it. A read replaces those of its stream.
        others = [
            one for one in self.accesses.get(base, ())
            if one[0] < start or one[1] > end or not (is_write or (one[2] == key and not one[4]))
        ]  # fmt: skip
        if others and others[-1][1:] == (start, key, number, is_write):  # the part before
            start = others.pop()[0]
        self.accesses[base] = [*others, (start, end, key, number, is_write)]

    def _find_unseen(self, key: Key, tensor: torch.Tensor) -> list[tuple[int, int, bool]]:
        """Return ranges of a tensor that are used by launches a stream has not waited for."""
        (low, high), base = find_range(tensor), tensor.untyped_storage().data_ptr()
        return [
            (max(start, low), min(end, high), is_write)
            for start, end, user, number, is_write in self.accesses.get(base, ())
            if start < high and low < end and not self.has_seen(key, user, number)
        ]


def run_once(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs work at its first call only. Other threads wait for its end."""
    todo, lock = [work], threading.RLock()

    def run() -> None:
        with lock:
            while todo:
                todo.pop()()

    return run


def find_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and of the first byte after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=False))
    return start, start + (last + 1) * tensor.element_size()


clocks = Clocks()
_current: dict[int, Stream] = {}
_numbers = itertools.count(1)


def reset() -> None:
    """Forget all launches, as a new process would."""
    clocks.__init__()  # type: ignore[misc]
    _current.clear()


class Stream:
    """A stream, as ``torch.Stream`` and ``torch.cuda.Stream`` have it."""

    def __init__(self, device: Any = None, *, number: int | None = None, **_: Any) -> None:
        self.device = resolve(device)
        self.stream_id = next(_numbers) if number is None else number
        self.key: Key = (self.device.index, self.stream_id)
        self._previous: list[tuple[Stream, int]] = []

    @property
    def view(self) -> dict[Key, int]:
        """The launches that the stream has waited for, and its latest one."""
        return clocks.views[self.key]

    def wait_stream(self, other: Stream) -> None:
        """Let later launches wait for the launches of another stream until now."""
        clocks.wait(self.key, other.view)

    def wait_event(self, event: Event) -> None:
        """Let later launches wait for an event."""
        clocks.wait(self.key, event.view)

    def record_event(self) -> Event:
        """Record a new event."""
        event = Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        recording.note("waits", "Stream.synchronize")
        clocks.wait(HOST, self.view)

    def __enter__(self) -> Stream:
        """Make the stream and its device current."""
        self._previous.append((current_stream(self.device), current_index()))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Make the previous stream and device current."""
        stream, index = self._previous.pop()
        set_stream(stream)
        set_current_index(index)


class Event:
    """An event, as ``torch.Event`` and ``torch.cuda.Event`` have it."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.device = resolve(device)
        self.view: dict[Key, int] = {}
        self._time_s: float | None = None
        self._was_asked = self._is_captured = False

    def record(self, stream: Stream | None = None) -> None:
        """Record all launches of a stream, by default the current one."""
        stream = current_stream(self.device) if stream is None else stream
        if stream.device != self.device:
            raise RuntimeError(f"Event device {self.device} does not match {stream.device}.")
        self._is_captured = bool(recording.captures)
        clocks.launch(stream.key)
        self.view = dict(stream.view)
        self._time_s, self._was_asked = time.perf_counter(), False

    def query(self) -> bool:
        """Return whether the event was reached. It is reached between two calls."""
        self._refuse_captured()
        if self._was_asked:
            clocks.wait(HOST, self.view)
        self._was_asked = True
        return self._is_known()

    def synchronize(self) -> None:
        """Let the host wait."""
        self._refuse_captured()
        recording.note("waits", "Event.synchronize")
        clocks.wait(HOST, self.view)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds to another event. Both must have been reached."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        self._refuse_captured()
        end._refuse_captured()
        if not (self._time_s and end._time_s and self._is_known() and end._is_known()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._time_s - self._time_s) * 1e3

    def _refuse_captured(self) -> None:
        if self._is_captured or recording.captures:
            raise RuntimeError("not permitted on an event last recorded in a capturing stream")

    def _is_known(self) -> bool:
        return all(clocks.has_seen(HOST, key, number) for key, number in self.view.items())


def resolve(device: Any) -> torch.device:
    """Return a device of the stand-in with its index, by default the current one."""
    found = torch.device(NAME, device) if isinstance(device, int) else torch.device(device or NAME)
    if found.type != NAME:
        raise RuntimeError(f"expected a device of the type {NAME}, got {found}")
    return torch.device(NAME, current_index()) if found.index is None else found


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device, at first its stream 0."""
    index = resolve(device).index
    return _current.get(index) or _current.setdefault(index, Stream(index, number=0))


def set_stream(stream: Stream) -> None:
    """Make a stream and its device current."""
    _current[stream.device.index] = stream
    set_current_index(stream.device.index)


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams of a device."""
    recording.note("waits", "synchronize")
    index = resolve(device).index
    for key in [key for key in clocks.views if key[0] == index]:
        clocks.wait(HOST, clocks.views[key])
