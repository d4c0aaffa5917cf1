"""The checks that graphs of all runners make before and after they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcore.modules.errors import GraphStateError
from mcore.modules.graphs.contract import GraphSpec
from mcore.modules.graphs.in_flight import InFlight
from mcore.modules.graphs.signatures import InputSignature

__all__ = ["CheckedGraph", "Replay"]

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
            raise GraphStateError(f"{self._place} was reset; capture it anew")
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
