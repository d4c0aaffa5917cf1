"""The checks that graphs of all runners make before and after they run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mcore.modules.errors import GraphInputMismatch, GraphStateError
from mcore.modules.graphs.runner import GraphSpec
from mcore.modules.precision import conversion_helper

Replay = Callable[[tuple[torch.Tensor, ...], dict[str, torch.Tensor], dict[str, Any]], Any]


class CheckedGraph:
    """A graph with the contract of GraphedCallable around a runner's way of running it.

    Args:
        spec: What was captured.
        replay: Called with positional tensors, keyword tensors and controls, which are those of
            ``is_first_microbatch``, ``cuda_graph_stream`` and ``cuda_graph_event`` that are given.
        strict: Also compare ``requires_grad`` and refuse a call before the last one's backward.
        free: Called once on reset.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> spec = GraphSpec(layer, layer.forward, (torch.ones(1, 2),))
        >>> graph = CheckedGraph(spec, lambda args, kwargs, controls: layer(*args))
        >>> graph(torch.ones(1, 2), is_first_microbatch=True).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        spec: GraphSpec,
        replay: Replay,
        *,
        strict: bool = True,
        free: Callable[[], object] | None = None,
    ) -> None:
        self._place = f"the graph of layer {spec.order}, slot {spec.microbatch}"
        self._signature = InputSignature(spec.args, _present(spec.kwargs))
        self._replay: Replay | None = replay
        self._free = free
        self._strict = strict
        self._flight = InFlight()

    @property
    def is_busy(self) -> bool:
        """Whether the backward of the last call is still to come."""
        return self._flight.is_busy

    def __call__(
        self,
        *args: torch.Tensor,
        is_first_microbatch: bool | None = None,
        cuda_graph_stream: Any = None,
        cuda_graph_event: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Check the inputs, run the graph and watch its outputs."""
        if self._replay is None:
            raise GraphStateError(f"{self._place} was reset; capture it again")
        tensors = _present(kwargs)
        self._signature.check(args, tensors, with_requires_grad=self._strict)
        if self._strict and self._flight.is_busy:
            raise GraphStateError(
                f"{self._place} is called again before the backward of its last call, whose "
                "tensors would be overwritten; run backward first, drop the outputs, or capture "
                "more slots"
            )
        controls = _present(
            {
                "is_first_microbatch": is_first_microbatch,
                "cuda_graph_stream": cuda_graph_stream,
                "cuda_graph_event": cuda_graph_event,
            }
        )
        outputs = self._replay(args, tensors, controls)
        return self._flight.watch(outputs) if self._strict else outputs

    def reset(self) -> None:
        """Free the graph; later calls raise GraphStateError. Does nothing the second time."""
        self._replay = None
        free, self._free = self._free, None
        if free is not None:
            free()


def _present(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


class TensorSignature(NamedTuple):
    """What must be the same in every call of a graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def signature_of(tensor: torch.Tensor) -> TensorSignature:
    """Return the signature of a tensor."""
    return TensorSignature(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


class InputSignature:
    """The signatures of a graph's positional and keyword inputs, none of which is None."""

    def __init__(self, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        self._expected = _signatures(args, kwargs)

    def check(
        self,
        args: tuple[torch.Tensor, ...],
        kwargs: Mapping[str, torch.Tensor],
        *,
        with_requires_grad: bool = True,
    ) -> None:
        """Raise GraphInputMismatch with every difference of these inputs from the sample."""
        given = _signatures(args, kwargs)
        # The usual case, decided without building messages.
        if given == self._expected:
            return
        differences = _differences(self._expected, given, with_requires_grad)
        if differences:
            raise GraphInputMismatch(
                "the inputs differ from those of the capture; pass the same kind or capture again: "
                + "; ".join(differences)
            )


_Signatures = dict["int | str", TensorSignature]


def _signatures(args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> _Signatures:
    signatures: _Signatures = {index: signature_of(tensor) for index, tensor in enumerate(args)}
    for name, tensor in kwargs.items():
        signatures[name] = signature_of(tensor)
    return signatures


def _differences(expected: _Signatures, given: _Signatures, with_requires_grad: bool) -> list[str]:
    differences = [f"input {name!r} is missing" for name in expected if name not in given]
    differences += [f"input {name!r} is unexpected" for name in given if name not in expected]
    for name in [name for name in expected if name in given]:
        for field in TensorSignature._fields:
            is_compared = with_requires_grad or field != "requires_grad"
            wanted, got = getattr(expected[name], field), getattr(given[name], field)
            if is_compared and wanted != got:
                differences.append(f"input {name!r}: {field} is {got}, captured with {wanted}")
    return differences


class _Token:
    """Lives as long as the autograd graph of one forward."""

    __slots__ = ("__weakref__", "backward_ran")

    def __init__(self) -> None:
        self.backward_ran = False


class _Watch(torch.autograd.Function):
    """Identity that holds a token and notes that backward passed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, token: _Token) -> torch.Tensor:
        ctx.token = token
        ctx.set_materialize_grads(False)
        # A view would have a _base, which pipeline schedules refuse to send.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        ctx.token.backward_ran = True
        return grad, None


class InFlight:
    """Whether outputs of a graph wait for their backward.

    Dropped outputs no longer wait: their autograd graph held the only reference to the token.
    """

    def __init__(self) -> None:
        self._token: weakref.ref[_Token] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a backward is still to come."""
        token = None if self._token is None else self._token()
        return token is not None and not token.backward_ran

    def watch(self, outputs: Any) -> Any:
        """Return the outputs, the first that requires grad replaced by a watched identity of it."""
        token = _Token()
        watched = False

        def watch_first(leaf: Any) -> Any:
            nonlocal watched
            if watched or not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                return leaf
            watched = True
            return _Watch.apply(leaf, token)  # type: ignore[no-untyped-call]

        replaced = conversion_helper(outputs, watch_first)
        if not watched:
            return outputs
        self._token = weakref.ref(token)
        return replaced
