"""The choice of a graph runner, and the eager one for devices without graphs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mcore.modules.config import read_field
from mcore.modules.graphs.checked import CheckedGraph, GraphCall
from mcore.modules.graphs.runner import (
    GraphedCallable,
    GraphRunner,
    GraphSpec,
    refusing_plain_forks,
)
from mcore.modules.graphs.te_runner import TEGraphRunner, recipe_of
from mcore.modules.graphs.torch_runner import TorchGraphRunner
from mcore.modules.precision import conversion_helper

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
        A new runner; TransformerEngine's with the recipe of ``fp8`` (and ``fp8_recipe``, if the
        configuration has it), ``fp4`` or ``quant_recipe``.

    Raises:
        ValueError: The configuration quantises in a way that TransformerEngine's graphs would
            leave out.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> resolve_graph_runner(SimpleNamespace(), torch.device("cpu")).name
        'eager'
    """
    impl = read_field(config, "cuda_graph_impl", "none")
    torch_runner = TorchGraphRunner()
    if impl == "transformer_engine" and TEGraphRunner().is_available(device):
        return _te_runner(config)
    chosen: GraphRunner = torch_runner if torch_runner.is_available(device) else EagerGraphRunner()
    is_below = impl == "transformer_engine" or (impl == "local" and chosen.name == "eager")
    if is_below:
        _log_downgrade(impl, chosen.name, device.type)
    return chosen


def _te_runner(config: object) -> TEGraphRunner:
    recipe = recipe_of(config)
    return TEGraphRunner(
        fp8_enabled=recipe is not None,
        fp8_recipe=recipe,
        fp8_weight_caching=recipe is not None,
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
    accelerator. Outputs are in memory of the graph: a call fills those of the last call with NaN
    (integers with the largest, booleans with their opposite), since a real graph overwrites them.

    Args:
        strict: Make all checks; False leaves out those of gradients, of calls in flight and of
            random streams, and outputs stay as they are.

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
        replay_of = _EagerReplay if self.strict else _eagerly
        return [CheckedGraph(spec, replay_of(spec), strict=self.strict) for spec in specs]


def _eagerly(spec: GraphSpec) -> Callable[[GraphCall], Any]:
    return lambda call: spec.fn(*call.args, **call.kwargs)


class _EagerReplay:
    """Runs a function each time, with outputs in memory that the next call spoils."""

    def __init__(self, spec: GraphSpec) -> None:
        self._function = spec.fn
        self._outputs: list[torch.Tensor] = []

    def __call__(self, call: GraphCall) -> Any:
        args = [self._input(tensor) for tensor in call.args]
        kwargs = {name: self._input(tensor) for name, tensor in call.kwargs.items()}
        with refusing_plain_forks():
            outputs = self._function(*args, **kwargs)
        for last in self._outputs:
            _spoil(last)
        self._outputs = []
        return conversion_helper(outputs, self._own)

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy an input that is an output of the last call, as a graph would before it runs."""
        storages = {output.untyped_storage().data_ptr() for output in self._outputs}
        return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor

    def _own(self, leaf: Any) -> Any:
        """Copy an output, which might be an input, a parameter or what a layer keeps."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copied = leaf.clone()
        self._outputs.append(copied.detach())
        return copied


def _spoil(tensor: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
