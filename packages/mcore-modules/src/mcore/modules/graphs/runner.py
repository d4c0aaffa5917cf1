"""What graph runners are given and give back, and the contract that their graphs keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from mcore.modules.errors import GraphStateError
from mcore.modules.graphs.signatures import InputSignature, LayerTensors
from mcore.modules.precision import conversion_helper


class MemoryPool:
    """Memory that graphs may share whose calls are nested.

    A graph's temporary memory may be that which a graph captured later keeps until its backward.
    So while a call of a graph is in flight, only graphs captured after it may run, and their
    backwards come before its own.
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
        """Note a call that is in flight from now on."""
        self._in_flight.append(weakref.ref(token))

    @property
    def innermost(self) -> FlightToken | None:
        """The call in flight whose graph was captured last."""
        while self._in_flight:
            token = self._in_flight[-1]()
            if token is not None and not token.backward_ran:
                return token
            self._in_flight.pop()
        return None


@dataclass(frozen=True)
class GraphSpec:
    """One graph to capture: one layer in one microbatch slot.

    Args:
        module: The layer; its parameters get gradients from the graph.
        fn: What to capture, called as ``fn(*args, **kwargs)``; it may use ``module`` only.
        args: Sample positional inputs. Their shapes, dtypes and devices are those of all later
            calls, and their memory may become the graph's input memory.
        kwargs: Sample keyword inputs.
        microbatch: The slot; graphs of different slots may be in flight at the same time.
        order: Place of the layer in the execution order within its slot.
        pool: Memory to share with graphs captured before; None for memory of the slot's own.

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
    """A captured graph, called with tensors like those it was captured with.

    All runners' graphs share the contract: number, shape, dtype and device of the tensors and the
    names of keyword tensors are those of the sample, autocast is that of the capture, and a
    gradient is given only where the capture had one, else GraphInputMismatch; so it is when a
    parameter or buffer of the layer was replaced, moved or unfrozen since. A keyword that is None
    counts as absent; module hooks do not run; outputs are valid until their backward has run or the
    next call, of graphs that share memory too; a graph that ran with gradients may not be called
    again before its backward has run or its outputs are gone, else GraphStateError.
    """

    def __call__(
        self, *args: torch.Tensor, is_first_microbatch: bool | None = None, **kwargs: Any
    ) -> Any:
        """Run the graph on new inputs; ``is_first_microbatch`` is for quantised weights."""

    def reset(self) -> None:
        """Free the graph; a later call raises GraphStateError."""


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
            allow_unused_input: Accept inputs and parameters that get no gradient.

        Returns:
            The graphs.
        """


def by_slot(specs: Sequence[GraphSpec]) -> list[list[GraphSpec]]:
    """Group specs by microbatch slot, in order of appearance."""
    slots: dict[int, list[GraphSpec]] = {}
    for spec in specs:
        slots.setdefault(spec.microbatch, []).append(spec)
    return list(slots.values())


class GraphCall(NamedTuple):
    """One checked call of a graph, for the runner's way of running it.

    Attributes:
        args: Positional tensors.
        kwargs: Keyword tensors.
        parameters: The layer's parameters, in the order of ``named_parameters()``.
        token: A runner with autograd nodes of its own stores it in them as ``token``.
        is_first_microbatch: As given.
    """

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    parameters: list[torch.Tensor]
    token: FlightToken
    is_first_microbatch: bool | None


class CheckedGraph:
    """A graph with the contract of GraphedCallable around a runner's way of running it.

    Args:
        spec: What was captured; not kept, so that a layer that is deleted frees its graphs.
        replay: Called with a :class:`GraphCall`; returns the outputs.
        strict: Also compare gradients, and refuse a call before the last one's backward.
        watches_backward: Whether ``replay`` calls ``token.finish()`` in its backward itself;
            otherwise outputs are watched here.
        free: Called once on reset.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> spec = GraphSpec(layer, layer.forward, (torch.ones(1, 2),))
        >>> graph = CheckedGraph(spec, lambda call: layer(*call.args))
        >>> graph(torch.ones(1, 2), is_first_microbatch=True).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        spec: GraphSpec,
        replay: Callable[[GraphCall], Any],
        *,
        strict: bool = True,
        watches_backward: bool = False,
        free: Callable[[], object] | None = None,
    ) -> None:
        self.pool = spec.pool
        self.number = 0 if spec.pool is None else spec.pool.add_graph()
        self._place = f"the graph of layer {spec.order}, slot {spec.microbatch}"
        self._signature = InputSignature(spec.args, _present(spec.kwargs))
        self._tensors = LayerTensors(spec.module)
        self._replay: Callable[[GraphCall], Any] | None = replay
        self._free = free
        self._strict = strict
        self._watches_backward = watches_backward
        self._last: weakref.ref[FlightToken] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the backward of the last call is still to come."""
        token = None if self._last is None else self._last()
        return token is not None and token.is_tracked and not token.backward_ran

    def is_last_call(self, token: FlightToken) -> bool:
        """Return whether no other call has come since."""
        return self._last is not None and self._last() is token

    def __call__(
        self,
        *args: torch.Tensor,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Check the inputs, run the graph and watch its outputs."""
        if self._replay is None:
            raise GraphStateError(f"{self._place} was reset; capture it again")
        tensors = _present(kwargs) if kwargs else kwargs
        with_gradients = self._strict and torch.is_grad_enabled()
        self._signature.check(args, tensors, with_gradients=with_gradients)
        parameters = self._tensors.check(with_gradients=with_gradients)
        if self._strict:
            self._check_memory()
        token = FlightToken(self)
        self._last = weakref.ref(token)
        outputs = self._replay(GraphCall(args, tensors, parameters, token, is_first_microbatch))
        if self._strict and not self._watches_backward:
            outputs = _watch(outputs, token)
        return outputs

    def _check_memory(self) -> None:
        """Raise GraphStateError if a call in flight needs memory that this one overwrites."""
        if self.is_busy:
            raise GraphStateError(
                f"{self._place} is called again before the backward of its last call, whose "
                "tensors would be overwritten; run backward first, drop the outputs, or capture "
                "more slots"
            )
        innermost = None if self.pool is None else self.pool.innermost
        if innermost is not None and innermost.number > self.number:
            raise GraphStateError(
                f"{self._place} shares memory with a graph that was captured later and whose "
                "backward is still to come; run that first, or capture this one again"
            )

    def reset(self) -> None:
        """Free the graph; later calls raise GraphStateError. Does nothing the second time."""
        self._replay = None
        free, self._free = self._free, None
        if free is not None:
            free()


def _present(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


class FlightToken:
    """Lives as long as the autograd graph of one call, whose nodes hold the only reference."""

    __slots__ = ("__weakref__", "_graph", "backward_ran", "is_tracked", "number", "pool")

    def __init__(self, graph: CheckedGraph) -> None:
        self._graph = graph
        self.backward_ran = False
        self.is_tracked = False
        self.number = graph.number
        self.pool = graph.pool

    def start(self) -> None:
        """Note that an autograd node holds the token: its graph's memory is in use from now on."""
        self.is_tracked = True
        if self.pool is not None:
            self.pool.enter(self)

    def finish(self) -> None:
        """Note that the backward comes now; GraphStateError if the tensors it needs are gone."""
        if self.backward_ran:
            raise GraphStateError(
                "a second backward of one call, whose tensors the first has overwritten; run "
                "one backward for all outputs"
            )
        innermost = None if self.pool is None else self.pool.innermost
        if not self._graph.is_last_call(self) or innermost not in (None, self):
            raise GraphStateError(
                "backward comes after another call has overwritten the tensors of this one; run "
                "the backward of a call before the next call, those of later layers first"
            )
        self.backward_ran = True


class _Watch(torch.autograd.Function):
    """Identity of all outputs of a call that notes when a backward passes."""

    @staticmethod
    def forward(ctx: Any, token: FlightToken, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.token = token
        token.start()
        ctx.set_materialize_grads(False)
        # A view would have a _base, which pipeline schedules refuse to send.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.token.finish()
        return None, *grads


def _watch(outputs: Any, token: FlightToken) -> Any:
    """Return the outputs, those that require grad replaced by watched identities of them."""
    if isinstance(outputs, torch.Tensor):
        return _watched((outputs,), token)[0] if outputs.requires_grad else outputs
    found = differentiable(outputs)
    if not found:
        return outputs
    replaced = {id(a): b for a, b in zip(found, _watched(tuple(found), token), strict=True)}
    return conversion_helper(outputs, lambda leaf: replaced.get(id(leaf), leaf))


def differentiable(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure that require grad."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found.append(leaf)
        return leaf

    conversion_helper(outputs, collect)
    return found


def _watched(tensors: tuple[torch.Tensor, ...], token: FlightToken) -> tuple[torch.Tensor, ...]:
    watched: tuple[torch.Tensor, ...] = _Watch.apply(token, *tensors)  # type: ignore[no-untyped-call]
    return watched
