"""Graphs captured by torch's own make_graphed_callables, for CUDA and XPU devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from mcore.modules.graphs.checked import CheckedGraph, Replay
from mcore.modules.graphs.runner import GraphedCallable, GraphSpec
from mcore.modules.precision import conversion_helper
from mcore.tensor.device import device_of
from mcore.versioning import experimental_api

Tensors = tuple[torch.Tensor, ...]


@experimental_api
class TorchGraphRunner:
    """Captures each layer's forward and backward with ``make_graphed_callables`` of the device.

    Layers are captured as functions of their inputs and parameters, so modules are left as they
    are and keyword inputs work. The graphs of one microbatch slot share a memory pool, which is
    valid as long as the layers of a slot run in execution order; slots do not share one, so they
    may run in any order, such as one-forward-one-backward.

    Gradients of a graph lie in memory that its next backward writes again, and autograd takes a
    first gradient as ``.grad`` without a copy, so that the second microbatch would count twice:
    the runner copies gradients of parameters and of inputs that are leaves.

    Args:
        clone_param_grads: Copy parameter gradients. False saves the copies where a hook adds each
            gradient to a ``main_grad`` at once and drops it.
        make_graphed_callables: Captures in place of the device's own function, with the same
            arguments.

    Example:
        >>> import torch
        >>> TorchGraphRunner().is_available(torch.device("cpu"))
        False
    """

    name = "torch"

    def __init__(
        self,
        *,
        clone_param_grads: bool = True,
        make_graphed_callables: Callable[..., Any] | None = None,
    ) -> None:
        self.clone_param_grads = clone_param_grads
        self._make_graphed_callables = make_graphed_callables

    def is_available(self, device: torch.device) -> bool:
        """Return whether torch can capture graphs on the device; does not initialise it."""
        return _device_function(device) is not None

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
    ) -> list[GraphedCallable]:
        """Capture the layers of each slot together; see GraphRunner.

        Raises:
            RuntimeError: The device of the inputs has no graphs.
        """
        captured: dict[int, GraphedCallable] = {}
        for slot in by_slot(specs):
            layers = [_FunctionalLayer(spec, clone=self.clone_param_grads) for spec in slot]
            device = device_of(_tensors_of(slot[0]))
            make = self._make_graphed_callables or _device_function(device)
            if make is None:
                raise RuntimeError(
                    f"torch captures no graphs on {device}; use EagerGraphRunner there"
                )
            with _autocast_without_cache(device):
                graphed = make(
                    tuple(layer.function for layer in layers),
                    tuple(layer.sample for layer in layers),
                    num_warmup_iters=num_warmup_iters,
                    allow_unused_input=allow_unused_input,
                )
            for spec, layer, call in zip(slot, layers, graphed, strict=True):
                captured[id(spec)] = CheckedGraph(spec, layer.replay_with(call))
        return [captured[id(spec)] for spec in specs]


def by_slot(specs: Sequence[GraphSpec]) -> list[list[GraphSpec]]:
    """Group specs by microbatch slot, in order of appearance."""
    slots: dict[int, list[GraphSpec]] = {}
    for spec in specs:
        slots.setdefault(spec.microbatch, []).append(spec)
    return list(slots.values())


class _FunctionalLayer:
    """A layer as a function of positional inputs, keyword inputs and parameters."""

    def __init__(self, spec: GraphSpec, *, clone: bool) -> None:
        self._clone = clone
        self._outputs = OutputTemplate()
        self._names = tuple(sorted(spec.kwargs))
        self._shell = _Shell(spec)
        owners = dict(spec.module.named_modules())
        self._parameters = [
            (f"layer.{name}", owners[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, _ in spec.module.named_parameters()
        ]
        self.sample = (
            spec.args,
            tuple(spec.kwargs[name] for name in self._names),
            tuple(_sample_of(parameter) for parameter in self._current()),
        )

    def _current(self) -> Iterator[torch.nn.Parameter]:
        # Looked up by name each time: loading may put other parameters in their places.
        for _, owner, name in self._parameters:
            parameter = owner._parameters[name]
            if parameter is None:
                raise RuntimeError(f"parameter {name!r} was removed after the capture")
            yield parameter

    def function(self, args: Tensors, keywords: Tensors, parameters: Tensors) -> Tensors:
        replaced = {
            key: tensor for (key, _, _), tensor in zip(self._parameters, parameters, strict=True)
        }
        kwargs = dict(zip(self._names, keywords, strict=True))
        outputs = torch.func.functional_call(self._shell, replaced, args, kwargs)
        return self._outputs.flatten(outputs)

    def replay_with(self, graphed: Callable[..., Any]) -> Replay:
        def replay(args: Tensors, kwargs: dict[str, torch.Tensor], _: dict[str, Any]) -> Any:
            parameters = tuple(self._current())
            if self._clone:
                parameters = tuple(_with_cloned_grad(parameter) for parameter in parameters)
            outputs = graphed(
                tuple(_with_cloned_grad(tensor) for tensor in args),
                tuple(_with_cloned_grad(kwargs[name]) for name in self._names),
                parameters,
            )
            return self._outputs.unflatten(outputs)

        return replay


class _Shell(torch.nn.Module):
    """A shell in which functional_call replaces a layer's parameters around its function."""

    def __init__(self, spec: GraphSpec) -> None:
        super().__init__()
        self.layer = spec.module
        self._function = spec.fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _CloneGrad(torch.autograd.Function):
    """Identity whose backward copies the gradient into separate memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # An unused parameter's gradient stays None instead of becoming zeros.
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else grad.clone()


def _with_cloned_grad(tensor: Any) -> Any:
    """Wrap leaves only: other tensors hand gradients on within the same backward."""
    if not (tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()):
        return tensor
    return _CloneGrad.apply(tensor)  # type: ignore[no-untyped-call]


def _sample_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the same memory, so that replays need no copy, but without a ``.grad``."""
    sample = parameter.detach().requires_grad_(parameter.requires_grad)
    sample.__dict__.update(parameter.__dict__)
    return sample


def _tensors_of(spec: GraphSpec) -> Iterator[torch.Tensor]:
    return chain(spec.args, spec.kwargs.values(), spec.module.parameters())


def _device_function(device: torch.device) -> Callable[..., Any] | None:
    """Return what captures graphs on a device, if anything, without initialising the device."""
    module = getattr(torch, device.type, None)
    function: Callable[..., Any] | None = getattr(module, "make_graphed_callables", None)
    return function if module is not None and function and module.is_available() else None


@contextlib.contextmanager
def _autocast_without_cache(device: torch.device) -> Iterator[None]:
    """Disable autocast's cache: cached casts would be missing from the captured work."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
        yield


class _Place:
    """A placeholder for a tensor in a template."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class OutputTemplate:
    """The structure of a layer's outputs, including what is not a tensor, such as None."""

    def __init__(self) -> None:
        self._template: Any = None

    def flatten(self, outputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the distinct tensors of the outputs, by first appearance; remember the rest."""
        tensors: list[torch.Tensor] = []

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        self._template = conversion_helper(outputs, replace)
        return tuple(tensors)

    def unflatten(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return outputs like the last that were flattened, with other tensors."""
        return conversion_helper(
            self._template, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf
        )
