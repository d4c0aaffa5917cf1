"""Graphs captured by TransformerEngine, with support for quantised weights."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mcore.modules.config import is_switched_on, read_field
from mcore.modules.graphs.checked import CheckedGraph, GraphCall
from mcore.modules.graphs.runner import (
    FunctionShell,
    GraphedCallable,
    GraphSpec,
    capture_by_slot,
    refusing_plain_forks,
    tracker_generators,
)
from mcore.modules.graphs.torch_runner import TorchGraphRunner
from mcore.versioning import experimental_api

# Options of this runner with their names in versions of TransformerEngine, newest first.
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
    not have are omitted. Each microbatch slot is captured in a separate call, with a separate
    memory pool, so slots may run in any order.

    The next backward of a graph overwrites the gradients of parameters: consume ``.grad`` (or use
    ``main_grad``) before that.

    Args:
        fp8_enabled: Run in 8-bit floating point.
        fp8_recipe: TransformerEngine's recipe object.
        fp8_group: Process group over which maxima are reduced.
        fp8_weight_caching: Quantise weights only in the first microbatch. Calls must then pass
            ``is_first_microbatch``.
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
        name = "transformer_engine"
        # Not imported to find out: only a capture needs it.
        return is_cuda and (name in sys.modules or importlib.util.find_spec(name) is not None)

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = True,
    ) -> list[GraphedCallable]:
        """Capture the layers of each slot together, see GraphRunner.

        Raises:
            RuntimeError: TransformerEngine is missing, or too old for graphs or keyword inputs.
            GraphStateError: A layer draws from a random tracker with plain states.
        """
        make = _import_te_function()
        # TransformerEngine registers these generators in its graphs, to draw new numbers.
        generators = dict(enumerate(tracker_generators()))
        if generators:
            module = importlib.import_module("transformer_engine.pytorch.distributed")
            module.set_all_rng_states(generators)
        known = inspect.signature(make).parameters

        def capture_slot(slot: list[GraphSpec]) -> Iterator[GraphedCallable]:
            options = self._choose_options(slot, known)
            with refusing_plain_forks():
                graphed = make(
                    # Modules, not functions: TransformerEngine looks up their parameters.
                    tuple(FunctionShell(spec) for spec in slot),
                    tuple(spec.args for spec in slot),
                    num_warmup_iters=num_warmup_iters,
                    allow_unused_input=allow_unused_input,
                    **options,
                )
            for spec, call in zip(slot, graphed, strict=True):
                free = getattr(call, "reset", None)
                graph = CheckedGraph(spec, _replay_with(call), free=free)
                graph.backward_dw = getattr(call, "backward_dw", None)
                yield graph

        return capture_by_slot(specs, capture_slot)

    def _choose_options(self, slot: list[GraphSpec], known: Mapping[str, Any]) -> dict[str, Any]:
        if any(spec.kwargs for spec in slot) and "sample_kwargs" not in known:
            raise RuntimeError(
                "the installed TransformerEngine captures no keyword inputs. Install a newer one"
            )
        wanted = {
            "sample_kwargs": tuple(spec.kwargs for spec in slot),
            # One chunk, one microbatch. Without an order it would replace the modules' forward.
            "_order": [1, -1],
            "_num_layers_per_chunk": [len(slot)],
            "_reuse_graph_input_output_buffers": self._reuse_buffers,
            "retain_graph_in_backward": self._retain_graph,
        }
        for option, value in self._fp8.items():
            name = next((name for name in _RENAMED_OPTIONS[option] if name in known), option)
            wanted[name] = value
        return {name: value for name, value in wanted.items() if name in known}


def _import_te_function() -> Callable[..., Any]:
    try:
        module = importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise RuntimeError(
            "TransformerEngine cannot be imported. Run pip install 'mcore-modules[te]'"
        ) from error
    function: Callable[..., Any] | None = getattr(module, "make_graphed_callables", None)
    if function is None:
        raise RuntimeError(
            "the installed TransformerEngine has no make_graphed_callables. "
            "Run pip install --upgrade 'mcore-modules[te]'"
        )
    return function


def _replay_with(graphed: Callable[..., Any]) -> Callable[[GraphCall], Any]:
    def replay(call: GraphCall) -> Any:
        is_first = call.is_first_microbatch
        controls = {} if is_first is None else {"is_first_microbatch": is_first}
        return graphed(*call.args, **call.kwargs, **controls)

    return replay


# The format and the class of each kind of recipe, by its name in the configuration.
_FORMATS = {"e4m3": "E4M3", "hybrid": "HYBRID"}
_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
# Options of DelayedScaling and their fields, if the configuration has them.
_DELAYED_OPTIONS = {
    "margin": "fp8_margin",
    "amax_history_len": "fp8_amax_history_len",
    "amax_compute_algo": "fp8_amax_compute_algo",
}


def recipe_of(config: object) -> Any:
    """Return TransformerEngine's recipe for a configuration, None if it does not quantise.

    ValueError for a quantisation that TransformerEngine's graphs do not support.
    """
    fp8, fp4, kitchen, custom = (
        read_field(config, name, None) for name in ("fp8", "fp4", "use_kitchen", "quant_recipe")
    )
    if not any(map(is_switched_on, (fp8, fp4, kitchen, custom))):
        return None
    recipes = importlib.import_module("transformer_engine.common.recipe")
    if is_switched_on(custom) and isinstance(custom, getattr(recipes, "Recipe", ())):
        return custom
    if is_switched_on(kitchen) or is_switched_on(custom):
        raise ValueError(
            f"use_kitchen={kitchen!r}, quant_recipe={custom!r}: not a recipe of "
            "TransformerEngine. Its graphs would run unquantised. Set cuda_graph_impl to "
            "'local', or pass TEGraphRunner(fp8_enabled=True, fp8_recipe=...)"
        )
    if is_switched_on(fp4):
        return _make_recipe(recipes, "NVFP4BlockScaling", f"fp4={fp4!r}", {})
    kind = read_field(config, "fp8_recipe", "delayed")
    if fp8 not in _FORMATS or kind not in _RECIPES:
        raise ValueError(
            f"fp8={fp8!r}, fp8_recipe={kind!r} is unknown. Choose fp8 from {list(_FORMATS)} and "
            f"fp8_recipe from {list(_RECIPES)}, or pass a TEGraphRunner with a recipe"
        )
    options = {"fp8_format": getattr(recipes.Format, _FORMATS[fp8])}
    if kind == "delayed":
        found = {
            option: read_field(config, name, None) for option, name in _DELAYED_OPTIONS.items()
        }
        options.update({option: value for option, value in found.items() if value is not None})
    return _make_recipe(recipes, _RECIPES[kind], f"fp8_recipe={kind!r}", options)


def _make_recipe(recipes: Any, name: str, setting: str, options: dict[str, Any]) -> Any:
    recipe_class = getattr(recipes, name, None)
    if recipe_class is None:
        raise ValueError(
            f"{setting} needs the recipe {name}, which the installed TransformerEngine lacks. "
            "Install a newer one"
        )
    return recipe_class(**options)
