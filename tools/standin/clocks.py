"""Streams and events with logical clocks, and the memory that each of them may read.

Ops run at once, so memory always has its last content. A stream that has not waited for the writer
of a range reads poison there instead: bytes 0xFF, which are NaN in every floating-point format.
Copies that the host has not waited for leave poison in their destination on the host.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from standin import recording
from standin.guard import current_index, set_current_index
from standin.memory import COUNT, NAME

Key = tuple[int, int]  # index of the device, number of the stream
Range = tuple[int, int]  # address of the first byte, and of the first byte after the last
HOST: Key = (-1, 0)
POISON = 0xFF


class RaceError(RuntimeError):
    """Memory was changed while a stream could still read it."""


class Clocks:
    """Which launches of each stream the other streams and the host have waited for."""

    def __init__(self) -> None:
        self._views: dict[Key, dict[Key, int]] = {HOST: {}}
        self.writes: dict[int, list[tuple[Range, Key, int]]] = {}
        self._pending: list[tuple[Key, int, Callable[[], object], bool]] = []

    def launch(self, key: Key) -> int:
        """Return the number of a new launch on a stream, which follows all that the host saw."""
        view = self._views.setdefault(key, {})
        _merge(view, self._views[HOST])
        view[key] = view.get(key, 0) + 1
        return view[key]

    def read_view(self, key: Key) -> dict[Key, int]:
        """Return the launches that a stream has waited for, and its latest one."""
        return dict(self._views.get(key, {}))

    def wait(self, key: Key, view: dict[Key, int]) -> None:
        """Let a stream or the host wait for a view."""
        _merge(self._views.setdefault(key, {}), view)
        if key == HOST:
            done = [item for item in self._pending if self.has_seen(HOST, *item[:2])]
            self._pending = [item for item in self._pending if not self.has_seen(HOST, *item[:2])]
            for _, _, finish, _ in done:
                finish()

    def has_seen(self, viewer: Key, key: Key, number: int) -> bool:
        """Return whether a stream or the host has waited for a launch."""
        return viewer == key or self._views.get(viewer, {}).get(key, 0) >= number

    def when_host_waits(
        self, key: Key, number: int, finish: Callable[[], object], *, or_at_end: bool = False
    ) -> None:
        """Call a function as soon as the host has waited for a launch, or also at the end."""
        self._pending.append((key, number, finish, or_at_end))

    def wrote(self, tensor: torch.Tensor, key: Key, number: int) -> None:
        """Note that a launch writes a tensor of the device."""
        base = tensor.untyped_storage().data_ptr()
        low, high = byte_range(tensor)
        others = [w for w in self.writes.get(base, ()) if w[0][0] < low or w[0][1] > high]
        self.writes[base] = [*others, ((low, high), key, number)]

    def find_unseen(self, tensor: torch.Tensor, viewer: Key) -> Iterator[Range]:
        """Yield the ranges of a tensor whose writer the viewer has not waited for."""
        writes = self.writes.get(tensor.untyped_storage().data_ptr())
        if writes is None:
            return
        low, high = byte_range(tensor)
        for (start, end), key, number in writes:
            start, end = max(start, low), min(end, high)
            if start < end and not self.has_seen(viewer, key, number):
                yield start, end

    @contextmanager
    def shown_to(
        self, viewer: Key, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> Iterator[None]:
        """Put poison into the ranges that a viewer may not read, while a block runs."""
        unseen = [r for tensor in read for r in self.find_unseen(tensor, viewer)]
        if not unseen:
            yield
            return
        saved = [(low, ctypes.string_at(low, high - low)) for low, high in unseen]
        for low, high in unseen:
            ctypes.memset(low, POISON, high - low)
        changed = [byte_range(tensor) for tensor in written]
        yield
        for low, content in saved:
            high = low + len(content)
            if not any(start < high and low < end for start, end in changed):
                ctypes.memmove(low, content, len(content))


def _merge(view: dict[Key, int], other: dict[Key, int]) -> None:
    for key, number in other.items():
        if view.get(key, 0) < number:
            view[key] = number


def byte_range(tensor: torch.Tensor) -> Range:
    """Return the address of a tensor's first byte, and of the first byte after its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=False))
    return start, start + (last + 1) * tensor.element_size()


clocks = Clocks()
_current: dict[int, Stream] = {}
_num_streams = [0]


def reset() -> None:
    """Forget all launches, as a new process would."""
    pending = clocks._pending
    clocks.__init__()  # type: ignore[misc]
    for finish in [item[2] for item in pending if item[3]]:
        finish()
    _current.clear()


class Stream:
    """A stream, as ``torch.Stream`` and ``torch.cuda.Stream`` have it."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = resolve(device)
        self.priority = priority
        _num_streams[0] += 1
        self.stream_id = _num_streams[0]
        self._previous: list[tuple[Stream, int]] = []

    @property
    def key(self) -> Key:
        """The stream's clock."""
        return self.device.index, self.stream_id

    @property
    def device_index(self) -> int:
        """The index of the stream's device."""
        return self.device.index

    def wait_stream(self, other: Stream) -> None:
        """Let later launches wait for the launches of another stream until now."""
        clocks.wait(self.key, clocks.read_view(other.key))

    def wait_event(self, event: Event) -> None:
        """Let later launches wait for an event."""
        clocks.wait(self.key, event.view)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, by default a new one."""
        event = Event(self.device) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        recording.note_wait("Stream.synchronize")
        clocks.wait(HOST, clocks.read_view(self.key))

    def query(self) -> bool:
        """Return whether the host has waited for all launches."""
        view = clocks.read_view(self.key)
        return clocks.has_seen(HOST, self.key, view.get(self.key, 0))

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

    def __eq__(self, other: object) -> bool:
        """Compare by identity of the stream on the device."""
        return isinstance(other, Stream) and other.key == self.key

    def __hash__(self) -> int:
        """Return a hash of the key."""
        return hash(self.key)


class Event:
    """An event, as ``torch.Event`` and ``torch.cuda.Event`` have it."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.device = resolve(device) if not isinstance(device, bool) else resolve(None)
        self.view: dict[Key, int] = {}
        self._time_s: float | None = None
        self._was_asked = self._is_captured = False

    def record(self, stream: Stream | None = None) -> None:
        """Record all launches of a stream, by default the current one."""
        stream = current_stream(self.device) if stream is None else stream
        if stream.device != self.device:
            raise RuntimeError(
                f"Event device {self.device} does not match recording stream's device "
                f"{stream.device}."
            )
        self._is_captured = recording.is_capturing()
        clocks.launch(stream.key)
        self.view = clocks.read_view(stream.key)
        self._time_s, self._was_asked = time.perf_counter(), False

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait, by default the current one."""
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Return whether the event was reached. It is reached between two calls."""
        self._check()
        if not self._is_known() and self._was_asked:
            clocks.wait(HOST, self.view)
        self._was_asked = True
        return self._is_known()

    def synchronize(self) -> None:
        """Let the host wait."""
        self._check()
        recording.note_wait("Event.synchronize")
        clocks.wait(HOST, self.view)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds to another event. Both must have been reached."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        self._check()
        end._check()
        if self._time_s is None or end._time_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self._is_known() and end._is_known()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._time_s - self._time_s) * 1e3

    def _check(self) -> None:
        if self._is_captured or recording.is_capturing():
            raise RuntimeError(
                "CUDA error: operation not permitted on an event last recorded in a capturing "
                "stream"
            )

    def _is_known(self) -> bool:
        return all(clocks.has_seen(HOST, key, number) for key, number in self.view.items())


def resolve(device: Any) -> torch.device:
    """Return a device of the stand-in with its index, by default the current one."""
    if isinstance(device, int):
        return torch.device(NAME, device)
    found = torch.device(NAME if device is None else device)
    if found.type != NAME:
        raise RuntimeError(f"expected a device of the type {NAME}, got {found}")
    return torch.device(NAME, current_index()) if found.index is None else found


def default_stream(device: Any = None) -> Stream:
    """Return the stream 0 of a device."""
    stream = Stream.__new__(Stream)
    stream.device, stream.stream_id, stream.priority = resolve(device), 0, 0
    stream._previous = []
    return stream


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device."""
    index = resolve(device).index
    return _current.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    """Make a stream and its device current."""
    _current[stream.device.index] = stream
    set_current_index(stream.device.index)


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams of a device."""
    recording.note_wait("synchronize")
    index = resolve(device).index
    for key in list(clocks._views):
        if key[0] == index:
            clocks.wait(HOST, clocks.read_view(key))
    assert 0 <= index < COUNT
