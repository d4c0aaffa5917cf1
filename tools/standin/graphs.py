"""Graphs of the stand-in: captured work runs again at each replay, on the memory of the capture.

A capture refuses what a CUDA stream refuses while it is captured. Its results are poison until a
replay. A replay first spoils all memory of the graph, and that of graphs that were captured later
into the same pool: on a GPU they may use the same memory.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from standin import clocks, recording
from standin.generators import Generator
from standin.memory import is_device

_pools: dict[tuple[int, int], list[weakref.ref[Graph]]] = {}


def find_capture() -> Graph | None:
    """Return the graph that is being captured."""
    return recording.captures[-1] if recording.captures else None  # type: ignore[return-value]


class Graph:
    """A graph, as ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._memory: dict[int, torch.Tensor] = {}
        self._changed: list[torch.Tensor] = []
        self._before: list[tuple[torch.Tensor, bytes]] = []
        self._states: dict[int, tuple[Any, torch.Tensor]] = {}
        self._pool: tuple[int, int] | None = None
        self.stream: clocks.Stream | None = None

    def register_generator_state(self, generator: Generator) -> None:
        """Do nothing: a capture registers each generator that it draws from."""

    def pool(self) -> tuple[int, int] | None:
        """Return the handle of the graph's memory."""
        return self._pool

    def capture_begin(self, pool: tuple[int, int] | None = None, **_: Any) -> None:
        """Start to record the current stream, which may not be the default one."""
        recording.refuse_in_capture("another capture")
        self.stream = clocks.current_stream()
        if self.stream.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = graph_pool_handle() if pool is None else pool
        _pools.setdefault(self._pool, []).append(weakref.ref(self))
        recording.captures.append(self)
        self._writes = dict(clocks.clocks.writes)

    def capture_end(self) -> None:
        """Stop. Nothing of the recorded work has happened, so its results are poison."""
        recording.captures.remove(self)
        for tensor, content in reversed(self._before):
            ctypes.memmove(clocks.byte_range(tensor)[0], content, len(content))
        for state, before in self._states.values():
            state.set_state(before)
        self._changed = [tensor for tensor, _ in self._before]
        self._before, self._states = [], {}
        clocks.clocks.writes = self._writes
        self._spoil()

    def reset(self) -> None:
        """Free the memory."""
        self._steps, self._memory, self._changed = [], {}, []

    def replay(self) -> None:
        """Do the recorded work once more on the current stream."""
        recording.refuse_in_capture("a replay")
        recording.note_op("graph replay")
        later = False
        for other in [reference() for reference in _pools[self._pool or (0, 0)]]:
            if other is not None and (later or other is self):
                other._spoil()
            later = later or other is self
        key = clocks.current_stream(self.stream.device if self.stream else None).key
        number = clocks.clocks.launch(key)
        for step in self._steps:
            step()
        for tensor in (*self._memory.values(), *self._changed):
            clocks.clocks.wrote(tensor, key, number)

    def add(self, step: Callable[[], object], made: list[torch.Tensor]) -> None:
        """Record one op, and the tensors that it has allocated."""
        self._steps.append(step)
        for tensor in made:
            if is_device(tensor):
                self._memory.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def keep_before(self, written: list[torch.Tensor]) -> None:
        """Remember the content of memory from outside the graph, which an op will change."""
        for tensor in written:
            if tensor.untyped_storage().data_ptr() not in self._memory:
                low, high = clocks.byte_range(tensor)
                self._before.append((tensor, ctypes.string_at(low, high - low)))

    def draw_from(self, state: Any) -> None:
        """Remember the state of a generator: a capture draws no number."""
        self._states.setdefault(id(state), (state, state.get_state()))

    def _spoil(self) -> None:
        for tensor in self._memory.values():
            storage = tensor.untyped_storage()
            ctypes.memset(storage.data_ptr(), clocks.POISON, storage.nbytes())


def graph_pool_handle() -> tuple[int, int]:
    """Return a handle of new memory for captures to share."""
    handle = (0, len(_pools) + 1)
    _pools[handle] = []
    return handle


@contextmanager
def graph(
    cuda_graph: Graph,
    pool: tuple[int, int] | None = None,
    stream: clocks.Stream | None = None,
    **_: Any,
) -> Iterator[None]:
    """Capture a block, as ``torch.cuda.graph``."""
    clocks.synchronize()
    gc.collect()
    with stream or clocks.Stream():
        cuda_graph.capture_begin(pool)
        try:
            yield
        finally:
            cuda_graph.capture_end()
