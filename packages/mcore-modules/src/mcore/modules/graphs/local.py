"""The manager that captures each layer separately during training."""

from __future__ import annotations

import enum
import functools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from mcore.modules.config import read_field
from mcore.modules.graphs.checked import (
    ReplacedTensorError,
    autocast_dtype,
    differentiable,
    signature_of,
)
from mcore.modules.graphs.resolve import resolve_graph_runner
from mcore.modules.graphs.runner import (
    FlightToken,
    GraphedCallable,
    GraphRunner,
    GraphSpec,
    GraphStateError,
    MemoryPool,
    graph_capturing,
    is_graph_capturing,
    preserved_state,
)
from mcore.modules.precision import conversion_helper
from mcore.tensor.device import device_of

logger = logging.getLogger(__name__)


@dataclass
class _Record:
    """Eager calls and graphs for calls with the same key."""

    eager_calls: int = 0
    in_flight: list[weakref.ref[_EagerCall]] = field(default_factory=list)
    graphs: list[GraphedCallable] = field(default_factory=list)

    def warms_up(self, num_calls: int) -> bool:
        """Return whether the next call runs eagerly.

        It also does while an eager call may be recomputed: the recomputation must save the same
        tensors.
        """
        # A call is over if it is gone or its backward has ended. Within the backward of this very
        # task it may still be recomputed.
        pending = (None, torch._C._current_graph_task_id())
        self.in_flight = [
            reference
            for reference in self.in_flight
            if (call := reference()) is not None and call.backward in pending
        ]
        return not self.graphs and (self.eager_calls < num_calls or bool(self.in_flight))

    def watch(self, outputs: Any) -> None:
        """Record an eager call and its outputs."""
        self.eager_calls += 1
        call = _EagerCall()
        for output in differentiable(outputs):
            if output.grad_fn is not None:
                output.register_hook(call.note_backward)  # type: ignore[no-untyped-call]
        self.in_flight.append(weakref.ref(call))


class _EagerCall:
    """Lives as long as the autograd graph of a call: its hooks hold the only reference."""

    __slots__ = ("__weakref__", "backward")

    def __init__(self) -> None:
        self.backward: int | None = None

    def note_backward(self, _: torch.Tensor) -> None:
        self.backward = torch._C._current_graph_task_id()


class LocalGraphManager:
    """Runs a layer eagerly a few times, then captures it and replays the graph.

    A recomputation of an eager call is eager too: the capture is delayed until its backward ends.

    Calls can share graphs if their tensors have the same shapes, dtypes, devices and
    ``requires_grad``, their other arguments are equal (these become part of the graph) and autocast
    is the same. For each such kind of call there are as many graphs as calls in flight: a graph is
    reused after the backward of its call has run or its outputs are gone. Layers that run one after
    the other share a memory pool, also with separate managers. A layer keeps graphs for the
    ``max_kinds`` kinds of call that were used last. Pass a number that changes with each call as a
    tensor, and pad sequences to few lengths: a new kind warms up and is captured. If parameters of
    a layer are replaced, moved or unfrozen, it is captured a second time. Deleting a layer frees
    its graphs.

    Calls run eagerly, through the module's hooks, in evaluation, without gradients and while other
    graphs are captured. They also run eagerly, with one logged warning, if an argument is neither a
    tensor nor a constant, or if the module has hooks, which a graph would leave out.

    Args:
        config: ``cuda_graph_warmup_steps`` is read from it at each call, 3 if it is missing.
        runner: Captures the graphs. None chooses by device at the first capture.
        max_graphs_per_key: Maximum number of graphs for one kind of call.
        max_kinds: Maximum number of kinds of call of one layer.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> manager = LocalGraphManager(SimpleNamespace(cuda_graph_warmup_steps=1))
        >>> layer = torch.nn.Linear(2, 2)
        >>> for _ in range(2):
        ...     manager(layer, (torch.ones(1, 2),), {}).sum().backward()
        >>> manager.num_graphs
        1
    """

    def __init__(
        self,
        config: Any,
        runner: GraphRunner | None = None,
        *,
        max_graphs_per_key: int = 64,
        max_kinds: int = 32,
    ) -> None:
        for name, limit in (("max_graphs_per_key", max_graphs_per_key), ("max_kinds", max_kinds)):
            if limit < 1:
                raise ValueError(f"{name} is {limit}. Pass at least 1")
        self.config = config
        self.runner = runner
        self.max_graphs_per_key = max_graphs_per_key
        self.max_kinds = max_kinds
        self._num_dropped = 0
        self._records: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, _Record]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def num_graphs(self) -> int:
        """Number of graphs captured and not freed."""
        return sum(
            len(record.graphs) for records in self._records.values() for record in records.values()
        )

    def stats(self) -> dict[str, int]:
        """Return counts: ``kinds`` of call kept, ``graphs``, and ``dropped_kinds`` so far.

        Example:
            >>> LocalGraphManager(None).stats()
            {'kinds': 0, 'graphs': 0, 'dropped_kinds': 0}
        """
        kinds = sum(map(len, self._records.values()))
        return {"kinds": kinds, "graphs": self.num_graphs, "dropped_kinds": self._num_dropped}

    def _find_record(self, module: torch.nn.Module, key: Hashable) -> _Record:
        """Return the record of a kind of call, now the last used, and drop the first if needed."""
        records = self._records.setdefault(module, {})
        record = records[key] = records.pop(key, _Record())
        if len(records) > self.max_kinds:
            del records[next(iter(records))]  # not reset: a backward may still run
            if not self._num_dropped:
                logger.warning(
                    "%s gets more than %d kinds of call, and the graphs of the least recent kinds "
                    "are dropped. Pass a number that changes with each call as a tensor, pad "
                    "inputs to few shapes, or raise max_kinds",
                    type(module).__name__,
                    self.max_kinds,
                )
            self._num_dropped += 1
        return record

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a module on the arguments of one call.

        Args:
            module: The layer. Its ``__call__`` is not used.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The module's outputs. They are in memory of the graph until their backward has run. If
            none of them requires grad, they are copies.

        Raises:
            GraphStateError: All ``max_graphs_per_key`` graphs are in flight.
        """
        runs_eagerly = is_graph_capturing() or not module.training or not torch.is_grad_enabled()
        call = None if runs_eagerly else _make_local_call(module, args, kwargs)
        if call is None:
            return torch.nn.Module.__call__(module, *args, **kwargs)
        autocast = autocast_dtype(device_of(call.tensors_and(module)).type)
        record = self._find_record(module, (call.key, autocast))
        if record.warms_up(read_field(self.config, "cuda_graph_warmup_steps", 3)):
            outputs = torch.nn.Module.__call__(module, *args, **kwargs)
            record.watch(outputs)
            return outputs
        try:
            return self._replay(module, call, record)
        except ReplacedTensorError as error:
            logger.warning("%s is captured again: %s", type(module).__name__, error)
            record.graphs.clear()  # not reset: a backward may still run
            return self._replay(module, call, record)

    def _replay(self, module: torch.nn.Module, call: LocalCall, record: _Record) -> Any:
        pool = _find_pool_of_inputs(call)
        graph = next((g for g in record.graphs if _is_free(g, pool)), None)
        if graph is None:
            graph = self._capture(module, call, len(record.graphs), pool or MemoryPool())
            record.graphs.append(graph)
        named_tensors: dict[str, Any] = call.named_tensors
        outputs = graph(*call.tensors, **named_tensors)
        # Without a backward it is unknown when the outputs may be overwritten: copy them.
        is_tracked = getattr(graph, "is_busy", False)
        return outputs if is_tracked else conversion_helper(outputs, _copy_constant)

    def reset(self) -> None:
        """Free all graphs and restart with warm-up calls. Does nothing without graphs."""
        for records in self._records.values():
            for graph in chain.from_iterable(record.graphs for record in records.values()):
                graph.reset()
        self._records.clear()

    def _capture(
        self, module: torch.nn.Module, call: LocalCall, slot: int, pool: MemoryPool
    ) -> GraphedCallable:
        if slot >= self.max_graphs_per_key:
            raise GraphStateError(
                f"all {slot} graphs of {type(module).__name__} for these inputs wait for their "
                "backward. Run backward, drop outputs, or raise max_graphs_per_key"
            )
        device = device_of(call.tensors_and(module))
        if self.runner is None:
            self.runner = resolve_graph_runner(self.config, device)
        spec = GraphSpec(
            module=module,
            fn=call.bound_to(weakref.ref(module)),
            args=tuple(_sample_of(tensor) for tensor in call.tensors),
            kwargs={name: _sample_of(tensor) for name, tensor in call.named_tensors.items()},
            microbatch=slot,
            pool=pool,
        )
        # Hooks around the capture, such as those of a checkpoint, must not see its saved tensors.
        without_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with graph_capturing(), preserved_state([module], device), without_hooks:
            [graph] = self.runner.capture(
                [spec],
                num_warmup_iters=read_field(self.config, "cuda_graph_warmup_steps", 3),
                allow_unused_input=True,
            )
        return graph


def _is_free(graph: Any, pool: MemoryPool | None) -> bool:
    """Return whether a graph may run, nested in the calls of a pool if one is given."""
    if getattr(graph, "is_busy", False):
        return False
    graph_pool = getattr(graph, "pool", None)
    if graph_pool is None:
        return True  # from a user's runner, which shares no memory
    innermost = graph_pool.innermost
    if pool is None:
        return innermost is None
    return graph_pool is pool and (innermost is None or innermost.number < graph.number)


_MOST_NODES = 32


def _find_pool_of_inputs(call: LocalCall) -> MemoryPool | None:
    """Return the pool of the graph that produced the inputs, if it may be shared.

    It may if the graph's call is the innermost in flight: then backwards run in reverse order.
    """
    tensors = chain(call.tensors, call.named_tensors.values())
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    for _ in range(_MOST_NODES):
        if not pending:
            return None
        node: Any = pending.pop(0)
        token = getattr(node, "token", None)
        if not isinstance(token, FlightToken):
            pending.extend(following for following, _ in node.next_functions if following)
        elif token.pool is not None and token.pool.innermost is token:
            return token.pool
    return None


def _make_local_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> LocalCall | None:
    if module._forward_hooks or module._forward_pre_hooks:
        reason = "it has forward hooks"
    elif module._backward_hooks or module._backward_pre_hooks:
        reason = "it has backward hooks"
    else:
        try:
            return LocalCall(args, kwargs)
        except TypeError as error:
            reason = str(error)
    _log_eager(type(module).__name__, reason)
    return None


@functools.cache
def _log_eager(module: str, reason: str) -> None:
    logger.warning("%s runs without a graph: %s", module, reason)


def _copy_constant(leaf: Any) -> Any:
    is_constant = isinstance(leaf, torch.Tensor) and not leaf.requires_grad
    return leaf.clone() if is_constant else leaf


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.Size),
)


class LocalCall:
    """The arguments of one call, split into tensors and constants, which become part of the graph.

    TypeError for another argument. Calls with the same ``key`` may share a graph.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        self.tensors = tuple(value for value in args if isinstance(value, torch.Tensor))
        self.named_tensors = {
            name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)
        }
        self.key: Hashable = (
            tuple(_make_key(f"argument {index}", value) for index, value in enumerate(args)),
            tuple((name, _make_key(f"argument {name!r}", kwargs[name])) for name in sorted(kwargs)),
        )

    def tensors_and(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Yield the tensors of this call, then the parameters of a module."""
        return chain(self.tensors, self.named_tensors.values(), module.parameters())

    def bound_to(self, module: weakref.ref[torch.nn.Module]) -> Callable[..., Any]:
        """Return a module's forward with the constants of this call, as a function of tensors.

        The reference is weak: a graph must not keep a layer alive.
        """
        # Drop the tensors of this call: the graph would keep them alive.
        slots = [_SLOT if isinstance(value, torch.Tensor) else value for value in self._args]
        constants = {
            name: value for name, value in self._kwargs.items() if name not in self.named_tensors
        }

        def bound(*tensors: torch.Tensor, **named_tensors: torch.Tensor) -> Any:
            remaining = iter(tensors)
            args = [next(remaining) if value is _SLOT else value for value in slots]
            layer = module()
            if layer is None:
                raise GraphStateError("the layer of this graph was deleted")
            return layer.forward(*args, **constants, **named_tensors)

        return bound


_SLOT = object()


def _make_key(place: str, value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return signature_of(value)
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # not the value: 0.0 == -0.0, and nan != nan
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if type(value) is not tuple:
        raise TypeError(f"{place} is a {type(value).__name__}, neither a tensor nor a constant")
    if any(isinstance(item, torch.Tensor) for item in value):
        raise TypeError(f"{place} is a tuple with a tensor: only plain tensors are captured")
    return tuple(_make_key(place, item) for item in value)
