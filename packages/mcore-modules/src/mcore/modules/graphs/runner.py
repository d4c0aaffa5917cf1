"""The interface of graph runners, and the flag that is set while they capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class GraphSpec:
    """One graph to capture: one layer in one microbatch slot.

    Args:
        module: The layer; its parameters get gradients from the graph.
        fn: What to capture, called as ``fn(*args, **kwargs)``; it may use ``module`` only.
        args: Sample positional inputs. Their shapes, dtypes, devices and ``requires_grad`` are
            those of all later calls, and their memory may become the graph's input memory.
        kwargs: Sample keyword inputs.
        microbatch: The slot; graphs of different slots may be in flight at the same time.
        order: Place of the layer in the execution order within its slot.

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


class GraphedCallable(Protocol):
    """A captured graph, called with tensors like those it was captured with.

    All runners' graphs share the contract: number, shape, dtype, device and ``requires_grad`` of
    the tensors and the names of keyword tensors are those of the sample, else GraphInputMismatch; a
    keyword that is None counts as absent; module hooks do not run; outputs are valid until the next
    call; a graph that ran with gradients may not be called again before its backward has run or its
    outputs are gone, else GraphStateError.
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
    """Tell layers inside the ``with`` block to run what goes into their graphs.

    Ends with the block, whatever is raised in it; may be nested.

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
