"""Graphs captured by TransformerEngine, which knows about quantised weights."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mcore.modules.graphs.checked import CheckedGraph, Replay
from mcore.modules.graphs.runner import GraphedCallable, GraphSpec
from mcore.modules.graphs.torch_runner import TorchGraphRunner, by_slot
from mcore.versioning import experimental_api

# Options of this runner with the names that TransformerEngine has given them, newest first.
_RENAMED_OPTIONS = {
    "fp8_enabled": ("enabled", "fp8_enabled"),
    "fp8_recipe": ("recipe", "fp8_recipe"),
    "fp8_group": ("amax_reduction_group", "fp8_group"),
    "fp8_weight_caching": ("cache_quantized_params", "fp8_weight_caching"),
}


@experimental_api
class TEGraphRunner:
    """Captures layers with ``transformer_engine.pytorch.make_graphed_callables``.

    TransformerEngine is imported at the first capture. Arguments that the installed version does
    not have are left out. Each microbatch slot is captured in a separate call, with its own memory
    pool, so slots may run in any order.

    Gradients of parameters lie in memory that the next backward of the same graph writes again:
    consume ``.grad`` (or use ``main_grad``) before that.

    Args:
        fp8_enabled: Run in 8-bit floating point.
        fp8_recipe: TransformerEngine's recipe object.
        fp8_group: Process group over which maxima are reduced.
        fp8_weight_caching: Quantise weights in the first microbatch only; calls must give
            ``is_first_microbatch`` then.
        retain_graph_in_backward: Keep the autograd graph during backward capture.
        reuse_graph_input_output_buffers: Share input and output memory between graphs.

    Example:
        >>> import torch
        >>> TEGraphRunner().is_available(torch.device("cpu"))
        False
    """

    name = "transformer_engine"

    def __init__(
        self,
        *,
        fp8_enabled: bool = False,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
        fp8_weight_caching: bool = False,
        retain_graph_in_backward: bool = False,
        reuse_graph_input_output_buffers: bool = False,
    ) -> None:
        self._fp8 = {
            "fp8_enabled": fp8_enabled,
            "fp8_recipe": fp8_recipe,
            "fp8_group": fp8_group,
            "fp8_weight_caching": fp8_weight_caching,
        }
        self._retain_graph = retain_graph_in_backward
        self._reuse_buffers = reuse_graph_input_output_buffers

    def is_available(self, device: torch.device) -> bool:
        """Return whether the device is a CUDA device and TransformerEngine is installed."""
        is_cuda = device.type == "cuda" and TorchGraphRunner().is_available(device)
        return is_cuda and _is_installed("transformer_engine")

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = True,
    ) -> list[GraphedCallable]:
        """Capture the layers of each slot together; see GraphRunner.

        TransformerEngine calls the modules themselves, so layers must run under
        ``graph_capturing()`` and without hooks.

        Raises:
            RuntimeError: TransformerEngine is missing, or too old for keyword inputs.
        """
        make = _te_function()
        known = inspect.signature(make).parameters
        captured: dict[int, GraphedCallable] = {}
        for slot in by_slot(specs):
            options = self._options(slot, known)
            graphed = make(
                tuple(spec.module for spec in slot),
                tuple(spec.args for spec in slot),
                num_warmup_iters=num_warmup_iters,
                allow_unused_input=allow_unused_input,
                **options,
            )
            for spec, call in zip(slot, graphed, strict=True):
                free = getattr(call, "reset", None)
                captured[id(spec)] = CheckedGraph(spec, _replay_with(call), free=free)
        return [captured[id(spec)] for spec in specs]

    def _options(self, slot: list[GraphSpec], known: Mapping[str, Any]) -> dict[str, Any]:
        if any(spec.kwargs for spec in slot) and "sample_kwargs" not in known:
            raise RuntimeError(
                "the installed TransformerEngine captures no keyword inputs; install a newer one"
            )
        wanted = {
            "sample_kwargs": tuple(spec.kwargs for spec in slot),
            # One chunk, one microbatch. Without an order the modules' forward would be replaced.
            "_order": [1, -1],
            "_num_layers_per_chunk": [len(slot)],
            "_reuse_graph_input_output_buffers": self._reuse_buffers,
            "retain_graph_in_backward": self._retain_graph,
        }
        for option, value in self._fp8.items():
            name = next((name for name in _RENAMED_OPTIONS[option] if name in known), option)
            wanted[name] = value
        return {name: value for name, value in wanted.items() if name in known}


def _is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _te_function() -> Callable[..., Any]:
    try:
        module = importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise RuntimeError(
            "TransformerEngine cannot be imported; pip install 'mcore-modules[te]'"
        ) from error
    function: Callable[..., Any] = module.make_graphed_callables
    return function


def _replay_with(graphed: Callable[..., Any]) -> Replay:
    def replay(
        args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], controls: dict[str, Any]
    ) -> Any:
        return graphed(*args, **kwargs, **controls)

    return replay
