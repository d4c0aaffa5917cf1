"""The choice of a graph runner, and the eager one for devices without graphs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from mcore.modules.config import is_switched_on, read_field
from mcore.modules.graphs.checked import CheckedGraph
from mcore.modules.graphs.runner import GraphedCallable, GraphRunner, GraphSpec
from mcore.modules.graphs.te_runner import TEGraphRunner
from mcore.modules.graphs.torch_runner import TorchGraphRunner

logger = logging.getLogger(__name__)


def resolve_graph_runner(config: object, device: torch.device) -> GraphRunner:
    """Return the best graph runner that a device has.

    TransformerEngine's where the configuration requests it with
    ``cuda_graph_impl="transformer_engine"`` and it is installed on a CUDA device; torch's on other
    CUDA and XPU devices; else eager running under the rules of graphs. Does not initialise a
    device. A choice below what the configuration requests is logged, once per process.

    Args:
        config: Any configuration object.
        device: Where the layers are.

    Returns:
        A new runner.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> resolve_graph_runner(SimpleNamespace(), torch.device("cpu")).name
        'eager'
    """
    impl = read_field(config, "cuda_graph_impl", "none")
    te_runner = _te_runner(config)
    torch_runner = TorchGraphRunner()
    if impl == "transformer_engine" and te_runner.is_available(device):
        return te_runner
    chosen: GraphRunner = torch_runner if torch_runner.is_available(device) else EagerGraphRunner()
    is_below = impl == "transformer_engine" or (impl == "local" and chosen.name == "eager")
    if is_below:
        _log_downgrade(impl, chosen.name, device.type)
    return chosen


def _te_runner(config: object) -> TEGraphRunner:
    fp8 = is_switched_on(read_field(config, "fp8", None))
    return TEGraphRunner(
        fp8_enabled=fp8,
        fp8_weight_caching=fp8,
        retain_graph_in_backward=read_field(config, "cuda_graph_retain_backward_graph", False),
    )


@functools.cache
def _log_downgrade(impl: str, chosen: str, device_type: str) -> None:
    logger.warning(
        "cuda_graph_impl is %r, but the %s graph runner is used: no better one is available on %s",
        impl,
        chosen,
        device_type,
    )


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
