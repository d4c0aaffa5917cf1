"""Graphs that check each call: its inputs, the layer's tensors, and the memory in flight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from mcore.modules.graphs.runner import (
    FlightToken,
    GraphInputMismatch,
    GraphSpec,
    GraphStateError,
)
from mcore.modules.precision import conversion_helper
from mcore.modules.traversal import iter_modules


class GraphCall(NamedTuple):
    """One checked call of a graph, for a runner's replay.

    Attributes:
        args: Positional tensors.
        kwargs: Keyword tensors.
        parameters: The layer's parameters, in the order of ``named_parameters()``.
        token: A runner with custom autograd nodes stores it in them as ``token``.
        is_first_microbatch: The argument of the call.
    """

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    parameters: list[torch.Tensor]
    token: FlightToken
    is_first_microbatch: bool | None


class CheckedGraph:
    """Adds the checks of GraphedCallable to a runner's replay.

    Args:
        spec: The spec of the capture. Not stored: deleting a layer frees its graphs.
        replay: Called with a :class:`GraphCall`. Returns the outputs.
        strict: Also compare gradients, and refuse a call before the backward of the last call.
        watches_backward: Whether ``replay`` calls ``token.finish()`` in its backward. If not, the
            outputs are wrapped to call it.
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
        self._signature = InputSignature(spec.args, _drop_none(spec.kwargs))
        self._tensors = LayerTensors(spec.module)
        self._replay: Callable[[GraphCall], Any] | None = replay
        self._free = free
        self._strict = strict
        self._watches_backward = watches_backward
        self._last: weakref.ref[FlightToken] | None = None
        self.backward_dw: Callable[[], object] | None = None  # computes delayed weight gradients

    @property
    def is_busy(self) -> bool:
        """Whether the backward of the last call has not run yet."""
        token = None if self._last is None else self._last()
        return token is not None and token.is_tracked and not token.backward_ran

    def __call__(
        self,
        *args: torch.Tensor,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Check the inputs, run the graph and watch its outputs."""
        if self._replay is None:
            raise GraphStateError(f"{self._place} was reset. Make a new capture")
        tensors = _drop_none(kwargs) if kwargs else kwargs
        with_gradients = self._strict and torch.is_grad_enabled()
        self._signature.check(args, tensors, with_gradients=with_gradients)
        parameters = self._tensors.check(with_gradients=with_gradients)
        if self._strict and self.is_busy:
            raise GraphStateError(
                f"{self._place} is called before the backward of its last call and would overwrite "
                "its tensors. Run backward first, drop the outputs, or capture more slots"
            )
        # A pool is a stack: a later graph keeps its tensors where this one would write.
        innermost = self.pool.innermost if self._strict and self.pool is not None else None
        if innermost is not None and innermost.number > self.number:
            raise GraphStateError(
                f"{self._place} shares memory with a graph that was captured later, and the "
                "backward of that graph has not run. Run it first, or make a new capture"
            )
        last = None if self._last is None else self._last()
        if last is not None:
            last.is_overwritten = True
        token = FlightToken(self.number, self.pool)
        self._last = weakref.ref(token)
        outputs = self._replay(GraphCall(args, tensors, parameters, token, is_first_microbatch))
        if self._strict and not self._watches_backward:
            outputs = _watch(outputs, token)
        return outputs

    def reset(self) -> None:
        """Free the graph. Later calls raise GraphStateError. A second reset does nothing."""
        self._replay = self.backward_dw = None
        free, self._free = self._free, None
        if free is not None:
            free()


def _drop_none(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


class _Watch(torch.autograd.Function):
    """Identity of all outputs of a call that records the start of a backward."""

    @staticmethod
    def forward(ctx: Any, token: FlightToken, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.token = token
        token.start()
        ctx.set_materialize_grads(False)
        # Not views: pipeline schedules refuse to send tensors with a _base.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.token.finish()
        return None, *grads


def _watch(outputs: Any, token: FlightToken) -> Any:
    """Return the outputs, with tensors that require grad replaced by watched identities."""
    if isinstance(outputs, torch.Tensor):
        return _apply_watch((outputs,), token)[0] if outputs.requires_grad else outputs
    found = differentiable(outputs)
    if not found:
        return outputs
    replaced = {id(a): b for a, b in zip(found, _apply_watch(tuple(found), token), strict=True)}
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


def _apply_watch(tensors: tuple[torch.Tensor, ...], token: FlightToken) -> tuple[torch.Tensor, ...]:
    watched: tuple[torch.Tensor, ...] = _Watch.apply(token, *tensors)  # type: ignore[no-untyped-call]
    return watched


class TensorSignature(NamedTuple):
    """The properties of an input that are the same in every call of a graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def signature_of(tensor: torch.Tensor) -> TensorSignature:
    """Return the signature of a tensor."""
    return TensorSignature(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device, None while it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class InputSignature:
    """The signatures of a graph's positional and keyword inputs, none of which is None."""

    def __init__(self, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        first = next(chain(args, kwargs.values()), None)
        self._device_type = "cpu" if first is None else first.device.type
        self._autocast = autocast_dtype(self._device_type)
        self._expected: dict[int | str, TensorSignature] = {
            name: signature_of(tensor) for name, tensor in _name_inputs(args, kwargs).items()
        }

    def check(
        self,
        args: tuple[torch.Tensor, ...],
        kwargs: Mapping[str, torch.Tensor],
        *,
        with_gradients: bool,
    ) -> None:
        """Raise GraphInputMismatch with every difference of these inputs from the sample."""
        # The usual case first, without building messages.
        autocast = autocast_dtype(self._device_type)
        given, expected = _name_inputs(args, kwargs), self._expected
        if (
            autocast is self._autocast
            and given.keys() == expected.keys()
            and all(_is_fitting(given[name], expected[name], with_gradients) for name in expected)
        ):
            return
        differences = [*_compare_inputs(expected, given, with_gradients)]
        if autocast is not self._autocast:
            differences.append(f"autocast is {autocast}, captured with {self._autocast}")
        raise GraphInputMismatch(
            "the inputs differ from the captured ones. Pass the same kind or make a new capture: "
            + "; ".join(differences)
        )


def _name_inputs(
    args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]
) -> dict[int | str, torch.Tensor]:
    """Return inputs by position or name."""
    named: dict[int | str, torch.Tensor] = dict(enumerate(args))
    named.update(kwargs)
    return named


def _is_fitting(tensor: torch.Tensor, expected: TensorSignature, with_gradients: bool) -> bool:
    return (
        tensor.shape == expected.shape
        and tensor.dtype is expected.dtype
        and tensor.device == expected.device
        # If the graph has a gradient that the call does not need, it is dropped.
        and (expected.requires_grad or not with_gradients or not tensor.requires_grad)
    )


def _compare_inputs(
    expected: Mapping[int | str, TensorSignature],
    given: Mapping[int | str, torch.Tensor],
    with_gradients: bool,
) -> Iterator[str]:
    yield from (f"input {name!r} is missing" for name in expected if name not in given)
    yield from (f"input {name!r} is unexpected" for name in given if name not in expected)
    for name in [name for name in expected if name in given]:
        wanted, got = expected[name], signature_of(given[name])
        pairs = zip(("shape", "dtype", "device"), got, wanted, strict=False)
        yield from (f"input {name!r}: {n} is {a}, captured with {b}" for n, a, b in pairs if a != b)
        if with_gradients and got.requires_grad and not wanted.requires_grad:
            yield f"input {name!r}: requires_grad is True, captured with False"


class ReplacedTensorError(GraphInputMismatch):
    """A parameter or buffer is not the tensor that was captured."""


class LayerTensors:
    """The parameters and buffers of a layer at the time of the capture.

    Holds the modules' dicts, not the modules: graphs must not keep a deleted layer alive.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = {id(tensor): name for name, tensor in module.named_parameters()}
        named.update({id(tensor): name for name, tensor in module.named_buffers()})
        owners = list(iter_modules(module))
        parameters = _list_captured([owner._parameters for owner in owners], named)
        buffers = _list_captured([owner._buffers for owner in owners], named)
        self._frozen = [entry for entry in parameters if not entry.required_grad]
        self._buffers = buffers
        self._entries = parameters
        self._fields = [entry[:4] for entry in parameters]  # plain tuples unpack twice as fast
        self._parameters = [entry.tensor for entry in parameters]

    def check(self, *, with_gradients: bool) -> list[torch.Tensor]:
        """Return the parameters. ReplacedTensorError if a tensor's memory has changed."""
        for held, key, captured, pointer in self._fields:
            tensor = held.get(key)
            if tensor is not captured or (pointer and tensor.data_ptr() != pointer):
                raise _make_replaced_error(self._entries, with_gradients)
        if with_gradients and any(entry.tensor.requires_grad for entry in self._frozen):
            raise _make_replaced_error(self._entries, with_gradients)
        for entry in self._buffers:
            tensor = entry.held.get(entry.key)
            if tensor is None or (entry.pointer and tensor.data_ptr() != entry.pointer):
                raise _make_replaced_error([entry], with_gradients)
        return self._parameters


class _CapturedTensor(NamedTuple):
    held: dict[str, Any]
    key: str
    tensor: torch.Tensor
    pointer: int
    required_grad: bool
    name: str


def _list_captured(dicts: Sequence[dict[str, Any]], named: dict[int, str]) -> list[_CapturedTensor]:
    """Return an entry for each distinct tensor, and remove its name."""
    return [
        _CapturedTensor(
            held, key, tensor, _get_pointer(tensor), tensor.requires_grad, named.pop(id(tensor))
        )
        for held in dicts
        for key, tensor in held.items()
        if tensor is not None and id(tensor) in named
    ]


def _get_pointer(tensor: torch.Tensor) -> int:
    """Return the address of a tensor, 0 for a tensor without memory, such as a quantised tensor."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _make_replaced_error(
    entries: list[_CapturedTensor], with_gradients: bool
) -> ReplacedTensorError:
    changes = []
    for entry in entries:
        tensor = entry.held.get(entry.key)
        what = f"{entry.name!r} of the layer"
        if tensor is None:
            changes.append(f"{what} was removed after the capture")
        elif tensor is not entry.tensor or (entry.pointer and tensor.data_ptr() != entry.pointer):
            changes.append(f"{what} was replaced or moved after the capture")
        elif with_gradients and tensor.requires_grad and not entry.required_grad:
            changes.append(f"{what} requires grad, but did not at the capture")
    return ReplacedTensorError(f"{'; '.join(changes)}. Make a new capture of the layer")
