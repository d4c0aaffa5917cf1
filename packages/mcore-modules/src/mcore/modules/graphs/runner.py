"""The protocol of graph runners, their specs and graphs, and contexts for captures."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from mcore.parallel.rng import (
    get_all_rng_states,
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)
from mcore.tensor.device import resolve_device


class GraphStateError(RuntimeError):
    """The state of a graph does not allow a request, for example a replay before its capture."""


class GraphInputMismatch(ValueError):  # noqa: N818 - a documented name
    """A graph is called with inputs that differ from the captured inputs."""


class MemoryPool:
    """Memory shared by graphs that have nested calls.

    A graph's temporary memory may be the memory that a graph captured later keeps until its
    backward. So while a call of a graph is in flight, only graphs captured after it may run, and
    their backwards must run before its backward.
    """

    def __init__(self) -> None:
        self.handle: Any = None  # set by the runner that captures first
        self._num_graphs = 0
        self._in_flight: list[weakref.ref[FlightToken]] = []

    def add_graph(self) -> int:
        """Return the number of a new graph."""
        self._num_graphs += 1
        return self._num_graphs

    def enter(self, token: FlightToken) -> None:
        """Record a call that is now in flight."""
        self._in_flight.append(weakref.ref(token))

    @property
    def innermost(self) -> FlightToken | None:
        """The call in flight of the graph that was captured last."""
        while self._in_flight:
            token = self._in_flight[-1]()
            if token is not None and not token.backward_ran:
                return token
            self._in_flight.pop()
        return None


class FlightToken:
    """Lives as long as the autograd graph of a call: its nodes hold the only reference."""

    __slots__ = ("__weakref__", "backward_ran", "is_overwritten", "is_tracked", "number", "pool")

    def __init__(self, number: int, pool: MemoryPool | None) -> None:
        self.number, self.pool = number, pool
        self.is_tracked = self.is_overwritten = self.backward_ran = False

    def start(self) -> None:
        """Record that an autograd node holds the token: the graph's memory is now in use."""
        self.is_tracked = True
        if self.pool is not None:
            self.pool.enter(self)

    def finish(self) -> None:
        """Record the start of the backward. GraphStateError if its tensors were overwritten."""
        if self.backward_ran:
            raise GraphStateError(
                "this is a second backward of a call, and the first has overwritten its tensors. "
                "Run one backward for all outputs"
            )
        innermost = None if self.pool is None else self.pool.innermost
        if self.is_overwritten or innermost not in (None, self):
            raise GraphStateError(
                "another call has overwritten the tensors of this backward. Run the backward of a "
                "call before the next call, with later layers first"
            )
        self.backward_ran = True


@dataclass(frozen=True)
class GraphSpec:
    """One graph to capture: one layer in one microbatch slot.

    Args:
        module: The layer. Its parameters get gradients from the graph.
        fn: The function to capture, called as ``fn(*args, **kwargs)``. It may use only ``module``.
        args: Sample positional inputs. All later calls have the same shapes, dtypes and devices,
            and the memory of the samples may become the graph's input memory.
        kwargs: Sample keyword inputs.
        microbatch: The slot. Graphs of different slots may be in flight at the same time.
        order: Position of the layer in the execution order within its slot.
        pool: Memory to share with graphs captured before. None for separate memory for the slot.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> GraphSpec(layer, layer.forward, (torch.ones(1, 2),)).order
        0
    """

    module: torch.nn.Module
    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)
    microbatch: int = 0
    order: int = 0
    pool: MemoryPool | None = None


class GraphedCallable(Protocol):
    """A captured graph, called with tensors like the captured inputs.

    These rules hold for the graphs of all runners. GraphInputMismatch is raised unless the number,
    shape, dtype and device of the tensors, the names of keyword tensors and autocast are the same
    as in the capture, and inputs require grad only if captured inputs did. It is also raised if a
    parameter or buffer of the layer was replaced, moved or unfrozen after the capture. A keyword
    with the value None is ignored. Module hooks do not run. Outputs are valid until their backward
    has run or until the next call of this graph or of a graph that shares its memory. After a call
    with gradients, a call before its backward raises GraphStateError while its outputs exist.
    """

    def __call__(
        self, *args: torch.Tensor, is_first_microbatch: bool | None = None, **kwargs: Any
    ) -> Any:
        """Run the graph on new inputs. ``is_first_microbatch`` is for quantised weights."""

    def reset(self) -> None:
        """Free the graph. A later call raises GraphStateError."""


@runtime_checkable
class GraphRunner(Protocol):
    """A way of capturing graphs."""

    name: str

    def is_available(self, device: torch.device) -> bool:
        """Return whether this runner can capture on a device, without initialising it."""

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
    ) -> list[GraphedCallable]:
        """Capture one graph for each spec, in the same order.

        Args:
            specs: Slot by slot, layers in execution order within each slot.
            num_warmup_iters: Eager runs before the capture.
            allow_unused_input: Accept inputs and parameters without a gradient.

        Returns:
            The graphs.
        """


def capture_by_slot(
    specs: Sequence[GraphSpec], capture: Callable[[list[GraphSpec]], Iterable[GraphedCallable]]
) -> list[GraphedCallable]:
    """Capture the layers of each microbatch slot together. Return graphs in the order of specs."""
    slots: dict[int, list[GraphSpec]] = {}
    for spec in specs:
        slots.setdefault(spec.microbatch, []).append(spec)
    captured: dict[int, GraphedCallable] = {}
    for slot in slots.values():
        captured.update(zip(map(id, slot), capture(slot), strict=True))
    return [captured[id(spec)] for spec in specs]


class FunctionShell(torch.nn.Module):
    """A module that runs a spec's function and has its layer's parameters."""

    def __init__(self, spec: GraphSpec) -> None:
        super().__init__()
        self.layer = spec.module
        self.training = spec.module.training
        self._function = spec.fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


_capturing: ContextVar[bool] = ContextVar("mcore_modules_graph_capturing", default=False)


def is_graph_capturing() -> bool:
    """Return whether this thread is inside :func:`graph_capturing`.

    Example:
        >>> is_graph_capturing()
        False
    """
    return _capturing.get()


@contextmanager
def graph_capturing() -> Iterator[None]:
    """Let layers inside the ``with`` block run the functions that are captured.

    Ends with the block, also after an exception. May be nested.

    Example:
        >>> with graph_capturing():
        ...     is_graph_capturing()
        True
    """
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


@contextmanager
def preserved_state(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Restore buffers and random states (CPU, device and tracker) after the block.

    Also after an exception. Buffers are restored in place, since captured graphs hold their memory.
    """
    # Modules may share buffers: each is saved once.
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    saved = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    devices = [] if device.type == "cpu" else [resolve_device(device).index]
    fork = torch.random.fork_rng(devices, device_type=device.type)
    # The random streams of the process-wide tracker: tensors, or live generators.
    tracker: Any = get_cuda_rng_tracker()
    states: dict[str, Any] = dict(tracker.get_states())
    live = [(g, g.get_state()) for g in states.values() if isinstance(g, torch.Generator)]
    seeds = set(getattr(tracker, "seeds_", ()))
    try:
        with fork:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
        # In place: captured graphs use these generator objects.
        for generator, state in live:
            generator.set_state(state)
        if states:
            tracker.set_states(states)
            tracker.seeds_ = seeds  # set_states forgets the used seeds


def tracker_generators() -> list[torch.Generator]:
    """Return the tracker's generators. A graph registers them to draw new numbers."""
    states = get_all_rng_states().values()
    return [state for state in states if isinstance(state, torch.Generator)]


@contextmanager
def refusing_plain_forks() -> Iterator[None]:
    """Refuse forks of a tracker with plain states: each replay would repeat the numbers."""
    tracker: Any = get_cuda_rng_tracker()
    if is_graph_safe_cuda_rng_tracker(tracker) or tracker.is_inference_rng_tracker:
        yield
        return
    tracker.fork = _refuse_fork
    try:
        yield
    finally:
        del tracker.fork


def _refuse_fork(*_: Any, **__: Any) -> Any:
    raise GraphStateError(
        "a layer draws from a stream of the random tracker. A graph cannot advance its plain "
        "states, so each replay would repeat its numbers. Pass use_cudagraphable_rng=True to "
        "model_parallel_cuda_manual_seed() or initialize_rng_tracker()"
    )
