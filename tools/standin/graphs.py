"""Graphs of the stand-in: captured work runs again at each replay, on the memory of the capture.

A capture refuses what a CUDA stream refuses while it is captured. Its results are poison until a
replay. A replay first spoils all memory of the graph, and that of graphs that were captured later
into the same pool: on a GPU they may use the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from standin import recording
from standin.clocks import POISON, Stream, clocks, current_stream, find_range, synchronize

numbers = itertools.count(1)  # of pools
_pools: defaultdict[tuple[int, int], list[weakref.ref[Graph]]] = defaultdict(list)


class Graph:
    """A graph, as ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.reset()

    def register_generator_state(self, generator: Any) -> None:
        """Do nothing: a capture registers each generator that it draws from."""

    def capture_begin(self, pool: tuple[int, int] | None = None, **_: Any) -> None:
        """Start to record the current stream, which may not be the default one."""
        recording.refuse_in_capture("another capture")
        self._device = current_stream().device
        if current_stream().stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._members = _pools[pool or (0, next(numbers))]
        self._members.append(weakref.ref(self))
        self._accesses = dict(clocks.accesses)
        recording.captures.append(self)

    def capture_end(self) -> None:
        """Stop. Nothing of the recorded work has happened, so its results are poison."""
        recording.captures.remove(self)
        while self._undo:
            self._undo.pop()()
        clocks.accesses = self._accesses
        self._spoil()

    def reset(self) -> None:
        """Free the memory."""
        self._steps: list[tuple[Any, Any, Callable[[], object]]] = []
        self._memory: dict[int, torch.Tensor] = {}

    def replay(self) -> None:
        """Do the recorded work once more on the current stream."""
        recording.refuse_in_capture("a replay")
        recording.note("ops", "graph replay")
        graphs = [reference() for reference in self._members]
        for graph in graphs[graphs.index(self) :]:
            if graph is not None:
                graph._spoil()
        for step in self._steps:
            clocks.run(current_stream(self._device).key, *step)

    def add(self, read: Any, written: Any, work: Callable[[], object], made: Any) -> None:
        """Record one op, and the tensors that it has allocated."""
        made = [one for one in made if all(one is not other for other in (*read, *written))]
        self._steps.append((read, [*written, *made], work))
        for tensor in made:
            self._memory.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def keep_before(self, written: list[torch.Tensor]) -> None:
        """Remember the content of memory from outside the graph, which an op will change."""
        for tensor in written:
            if tensor.untyped_storage().data_ptr() not in self._memory:
                low, high = find_range(tensor)
                content = ctypes.string_at(low, high - low)
                self._undo.append(functools.partial(ctypes.memmove, low, content, high - low))

    def draw_from(self, state: Any) -> None:
        """Remember the state of a generator: a capture draws no number."""
        self._undo.append(functools.partial(state.set_state, state.get_state()))

    def _spoil(self) -> None:
        for tensor in self._memory.values():
            storage = tensor.untyped_storage()
            ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())


@contextmanager
def graph(cuda_graph: Graph, pool: tuple[int, int] | None = None, **_: Any) -> Iterator[None]:
    """Capture a block, as ``torch.cuda.graph``."""
    synchronize()
    with Stream():
        cuda_graph.capture_begin(pool)
        try:
            yield
        finally:
            cuda_graph.capture_end()
