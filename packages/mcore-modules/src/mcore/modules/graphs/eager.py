"""Graphs that are none: the layer runs anew each time, with the checks of a real graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcore.modules.graphs.checked import CheckedGraph
from mcore.modules.graphs.contract import GraphedCallable, GraphSpec

__all__ = ["EagerGraphRunner"]


class EagerGraphRunner:
    """Runs layers eagerly under the rules of graphs, on any device.

    With the same checks as real graphs, so that a test on the CPU finds what would fail on an
    accelerator.

    Args:
        strict: Also compare ``requires_grad`` of inputs, and refuse a call before the backward of
            the last one.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> spec = GraphSpec(layer, layer.forward, (torch.ones(1, 2),))
        >>> [graph] = EagerGraphRunner().capture([spec])
        >>> graph(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    name = "eager"

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict

    def is_available(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
    ) -> list[GraphedCallable]:
        """Return one callable for each spec; runs nothing, whatever the number of warm-ups."""
        return [CheckedGraph(spec, _eagerly(spec), strict=self.strict) for spec in specs]


def _eagerly(spec: GraphSpec) -> Any:
    def run(
        args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], _: dict[str, Any]
    ) -> Any:
        return spec.fn(*args, **kwargs)

    return run
