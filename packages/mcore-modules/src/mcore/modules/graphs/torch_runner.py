"""Graphs captured with torch's graph classes, for CUDA and XPU devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from mcore.modules.graphs.checked import CheckedGraph, GraphCall, autocast_dtype
from mcore.modules.graphs.runner import (
    FlightToken,
    FunctionShell,
    GraphedCallable,
    GraphSpec,
    capture_by_slot,
    refusing_plain_forks,
    tracker_generators,
)
from mcore.modules.precision import conversion_helper
from mcore.tensor.device import device_of
from mcore.versioning import experimental_api

Tensors = tuple[torch.Tensor, ...]


class GraphDevice(Protocol):
    """The graph functions of a device."""

    def graph(self) -> Any:
        """Return a new graph with ``register_generator_state``, ``replay`` and ``reset``."""

    def pool(self) -> Any:
        """Return the handle of new memory for captures to share."""

    def warming_up(self) -> AbstractContextManager[Any]:
        """Surround runs before a capture."""

    def capturing(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """Record the operations of the block into a graph, with memory from a pool."""


class _TorchDevice:
    """The graphs of ``torch.cuda`` or ``torch.xpu`` on one device, which need not be current."""

    def __init__(self, device: torch.device) -> None:
        self._module = _find_device_module(device)
        if self._module is None:
            raise RuntimeError(f"torch captures no graphs on {device}. Use EagerGraphRunner there")
        self._device = device
        self.pool = self._module.graph_pool_handle

    def graph(self) -> Any:
        graph_class = getattr(self._module, "CUDAGraph", None) or self._module.XPUGraph
        return graph_class()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        with self._module.device(self._device):
            self._module.synchronize()
            with self._module.stream(self._module.Stream()):
                yield
            self._module.synchronize()

    @contextlib.contextmanager
    def capturing(self, graph: Any, pool: Any) -> Iterator[None]:
        with self._module.device(self._device), self._module.graph(graph, pool=pool):
            yield


@experimental_api
class TorchGraphRunner:
    """Captures each layer's forward and backward in a graph of the device.

    Layers are captured as functions of their inputs and parameters, so modules are not changed and
    keyword inputs work. The graphs of a microbatch slot share a memory pool, so the layers of a
    slot must run in execution order. Each slot has a separate pool, so slots may run in any order,
    such as one-forward-one-backward. Graphs register the generators of the random tracker, so forks
    draw new numbers at each replay. A tracker with plain states is refused.

    The next backward of a graph overwrites its gradients, and autograd uses a first gradient as
    ``.grad`` without a copy, so the second microbatch would count twice. Therefore the runner
    copies gradients of parameters and of inputs that are leaves.

    Args:
        clone_param_grads: Copy parameter gradients. False saves the copies if a hook immediately
            adds each gradient to a ``main_grad`` and drops it.
        device: Records graphs instead of the inputs' device, for tests without one.

    Example:
        >>> import torch
        >>> TorchGraphRunner().is_available(torch.device("cpu"))
        False
    """

    name = "torch"

    def __init__(
        self, *, clone_param_grads: bool = True, device: GraphDevice | None = None
    ) -> None:
        self.clone_param_grads = clone_param_grads
        self._device = device

    def is_available(self, device: torch.device) -> bool:
        """Return whether torch can capture graphs on the device, without initialising it."""
        return _find_device_module(device) is not None

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
    ) -> list[GraphedCallable]:
        """Capture the layers of each slot together, see GraphRunner.

        Raises:
            RuntimeError: The device of the inputs has no graphs.
            GraphStateError: A layer draws from a random tracker with plain states.
        """

        def capture_slot(slot: list[GraphSpec]) -> Iterator[GraphedCallable]:
            tensors = (
                (*spec.args, *spec.kwargs.values(), *spec.module.parameters()) for spec in slot
            )
            location = device_of(chain.from_iterable(tensors))
            device = self._device or _TorchDevice(location)
            generators = [g for g in tracker_generators() if g.device == location]
            recordings = [_Recording(spec, device, generators, allow_unused_input) for spec in slot]
            # Casts that autocast has cached would be missing from the captured work.
            dtype = autocast_dtype(location.type)
            uncached: AbstractContextManager[Any] = contextlib.nullcontext()
            if dtype is not None:
                uncached = torch.autocast(location.type, dtype=dtype, cache_enabled=False)
            with uncached, refusing_plain_forks():
                _record(recordings, device, num_warmup_iters, slot)
            for spec, recording in zip(slot, recordings, strict=True):
                replay = _Replay(recording, clone_param_grads=self.clone_param_grads)
                yield CheckedGraph(spec, replay, watches_backward=True, free=replay.free)

        return capture_by_slot(specs, capture_slot)


def _record(
    recordings: list[_Recording], device: GraphDevice, num_warmups: int, slot: list[GraphSpec]
) -> None:
    """Run layers a few times, then record all forwards, then all backwards in reverse order."""
    with device.warming_up():
        for recording in recordings:
            for _ in range(num_warmups):
                recording.run_forward()
                recording.run_backward(keep=False)
            recording.forget()
    for spec in slot:
        if spec.pool is not None and spec.pool.handle is None:
            spec.pool.handle = device.pool()
    separate = device.pool() if any(spec.pool is None for spec in slot) else None
    pools = [separate if spec.pool is None else spec.pool.handle for spec in slot]
    for recording, pool in zip(recordings, pools, strict=True):
        with device.capturing(recording.forward_graph, pool):
            recording.run_forward()
    for recording, pool in reversed(list(zip(recordings, pools, strict=True))):
        recording.prepare_backward()
        if recording.wanted and any(grad is not None for grad in recording.grad_outputs):
            with device.capturing(recording.backward_graph, pool):
                # Graphs that share a pool across captures keep the saved tensors of their forwards.
                recording.run_backward(keep=recording.shares_pool)


class _Recording:
    """A layer's graphs during recording, and the memory that they read and write."""

    def __init__(
        self,
        spec: GraphSpec,
        device: GraphDevice,
        generators: list[torch.Generator],
        allow_unused: bool,
    ) -> None:
        self.forward_graph, self.backward_graph = device.graph(), device.graph()
        for generator in generators:
            self.forward_graph.register_generator_state(generator)
            self.backward_graph.register_generator_state(generator)
        self.shares_pool = spec.pool is not None
        self._allow_unused = allow_unused
        self._spec = spec
        self._shell = FunctionShell(spec)
        self.names = tuple(sorted(spec.kwargs))
        self.inputs = (*spec.args, *(spec.kwargs[name] for name in self.names))
        named = {f"layer.{name}": p for name, p in spec.module.named_parameters()}
        self.parameters = {name: _sample_of(parameter) for name, parameter in named.items()}
        self.statics = (*self.inputs, *self.parameters.values())
        self.wanted = [tensor for tensor in self.statics if tensor.requires_grad]
        self.template = OutputTemplate()
        self.outputs: Tensors = ()
        self.grad_outputs: list[torch.Tensor | None] = []
        self.grads: list[torch.Tensor | None] = []

    def run_forward(self) -> None:
        kwargs = dict(zip(self.names, self.inputs[len(self._spec.args) :], strict=True))
        with torch.enable_grad():
            outputs = torch.func.functional_call(
                self._shell, self.parameters, self._spec.args, kwargs
            )
        self.outputs = self.template.flatten(outputs)
        self.grad_outputs = []

    def forget(self) -> None:
        """Free the tensors of the last run."""
        self.outputs, self.grad_outputs, self.grads = (), [], []

    def prepare_backward(self) -> None:
        """Allocate the memory for gradients of the outputs."""
        self.grad_outputs = [
            torch.zeros_like(output) if output.requires_grad else None for output in self.outputs
        ]

    def run_backward(self, *, keep: bool) -> None:
        if not self.grad_outputs:
            self.prepare_backward()
        differentiable = [output for output in self.outputs if output.requires_grad]
        if not (differentiable and self.wanted):
            return
        computed = torch.autograd.grad(
            differentiable,
            self.wanted,
            [grad for grad in self.grad_outputs if grad is not None],
            allow_unused=self._allow_unused,
            retain_graph=keep,
        )
        remaining = iter(computed)
        self.grads = [next(remaining) if t.requires_grad else None for t in self.statics]


class _Replay:
    """A recorded layer: copies inputs into its memory, replays, returns its outputs.

    It has no reference to the layer: deleting a layer frees its graphs.
    """

    def __init__(self, recording: _Recording, *, clone_param_grads: bool) -> None:
        self.forward_graph = recording.forward_graph
        self.backward_graph = recording.backward_graph
        self._names = recording.names
        self._template = recording.template
        # With a shared pool, the outputs keep the saved tensors of the forward alive.
        self._kept = recording.outputs if recording.shares_pool else ()
        self.inputs = [tensor.detach() for tensor in recording.inputs]
        self.pointers = [tensor.data_ptr() for tensor in self.inputs]
        self.outputs = [output.detach() for output in recording.outputs]
        self.constants = [i for i, out in enumerate(recording.outputs) if not out.requires_grad]
        self.grad_outputs = recording.grad_outputs
        self.grads = recording.grads or [None] * len(recording.statics)
        # With a shared pool, an earlier layer's backward may overwrite a gradient that autograd
        # still has to add to another one.
        self.clone_input_grads = recording.shares_pool
        self.clone_param_grads = clone_param_grads

    def __call__(self, call: GraphCall) -> Any:
        inputs = (*call.args, *(call.kwargs[name] for name in self._names))
        outputs = _Replayed.apply(self, call.token, *inputs, *call.parameters)  # type: ignore[no-untyped-call]
        return self._template.unflatten(outputs)

    def free(self) -> None:
        self.forward_graph.reset()
        self.backward_graph.reset()
        self._kept = ()
        self.inputs, self.outputs, self.grad_outputs, self.grads = [], [], [], []


class _Replayed(torch.autograd.Function):
    """The autograd node of a whole layer."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, token: FlightToken, *tensors: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.token = replay, token
        token.start()
        num_inputs = len(replay.inputs)
        ctx.cloned = [replay.clone_input_grads or x.is_leaf for x in tensors[:num_inputs]]
        for static, pointer, given in zip(replay.inputs, replay.pointers, tensors, strict=False):
            if given.data_ptr() != pointer:
                static.copy_(given)
        replay.forward_graph.replay()
        outputs = tuple([output.detach() for output in replay.outputs])
        if replay.constants:
            ctx.mark_non_differentiable(*(outputs[index] for index in replay.constants))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.token.finish()
        replay = ctx.replay
        for static, grad in zip(replay.grad_outputs, grads, strict=True):
            if static is None:
                continue
            if grad is None:
                static.zero_()
            elif static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        replay.backward_graph.replay()
        is_cloned = ctx.cloned + [replay.clone_param_grads] * (len(replay.grads) - len(ctx.cloned))
        # The next backward writes the same memory: only gradients that this backward consumes are
        # returned without a copy.
        return (
            None,
            None,
            *[
                grad if grad is None else grad.clone() if cloned else grad.detach()
                for grad, cloned in zip(replay.grads, is_cloned, strict=True)
            ],
        )


def _sample_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the same memory without a ``.grad``: replays need no copy."""
    sample = parameter.detach().requires_grad_(parameter.requires_grad)
    sample.__dict__.update(parameter.__dict__)
    return sample


def _find_device_module(device: torch.device) -> Any:
    """Return torch's module of a device that has graphs, if any, without initialising it."""
    module = getattr(torch, device.type, None)
    has_graphs = hasattr(module, "graph_pool_handle") and hasattr(module, "graph")
    return module if module is not None and has_graphs and module.is_available() else None


class _Place(int):
    """A placeholder for a tensor in a template: its index."""


class OutputTemplate:
    """The structure of a layer's outputs, with items that are not tensors, such as None."""

    def __init__(self) -> None:
        self._template: Any = None

    def flatten(self, outputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the outputs in order. Remember the rest."""
        tensors: list[torch.Tensor] = []

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        self._template = conversion_helper(outputs, replace)
        return tuple(tensors)

    def unflatten(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the structure of the last flattened outputs with other tensors."""
        if isinstance(self._template, _Place):
            return tensors[0]
        return conversion_helper(
            self._template, lambda leaf: tensors[leaf] if isinstance(leaf, _Place) else leaf
        )
