"""The choice of a graph runner, and the eager runner for devices without graphs."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mcore.modules.config import read_field
from mcore.modules.graphs.checked import CheckedGraph, GraphCall
from mcore.modules.graphs.runner import (
    GraphedCallable,
    GraphRunner,
    GraphSpec,
    GraphStateError,
    refusing_plain_forks,
)
from mcore.modules.graphs.te_runner import TEGraphRunner, recipe_of
from mcore.modules.graphs.torch_runner import TorchGraphRunner
from mcore.modules.precision import conversion_helper
from mcore.modules.traversal import iter_modules

logger = logging.getLogger(__name__)


def resolve_graph_runner(config: object, device: torch.device) -> GraphRunner:
    """Return the best graph runner for a device.

    On a CUDA device with TransformerEngine installed and
    ``cuda_graph_impl="transformer_engine"``, it is TransformerEngine's. On other CUDA and XPU
    devices it is torch's. Elsewhere layers run eagerly with the checks of graphs. Does not
    initialise a device. If the runner is not the requested one, this is logged once per process.

    Args:
        config: Any configuration object.
        device: The device of the layers.

    Returns:
        A new runner. TransformerEngine's has the recipe of ``fp8`` (and ``fp8_recipe``, if the
        configuration has it), ``fp4`` or ``quant_recipe``.

    Raises:
        ValueError: The configuration has a quantisation that TransformerEngine's graphs do not
            support.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> resolve_graph_runner(SimpleNamespace(), torch.device("cpu")).name
        'eager'
    """
    impl = read_field(config, "cuda_graph_impl", "none")
    torch_runner = TorchGraphRunner()
    if impl == "transformer_engine" and TEGraphRunner().is_available(device):
        recipe = recipe_of(config)
        return TEGraphRunner(
            fp8_enabled=recipe is not None,
            fp8_recipe=recipe,
            fp8_weight_caching=recipe is not None,
            retain_graph_in_backward=read_field(config, "cuda_graph_retain_backward_graph", False),
        )
    chosen: GraphRunner = torch_runner if torch_runner.is_available(device) else EagerGraphRunner()
    is_below = impl == "transformer_engine" or (impl == "local" and chosen.name == "eager")
    if is_below:
        _log_downgrade(impl, chosen.name, device.type)
    return chosen


@functools.cache  # logged once for each kind of downgrade, not for each layer
def _log_downgrade(impl: str, chosen: str, device_type: str) -> None:
    logger.warning(
        "cuda_graph_impl is %r, but the %s graph runner is used: no better one is available on %s",
        impl,
        chosen,
        device_type,
    )


class EagerGraphRunner:
    """Runs layers eagerly with the checks of graphs, on any device.

    A test on the CPU finds errors that would occur with real graphs on an accelerator. As a real
    graph overwrites its outputs, a call fills the outputs of the last call with NaN (integers with
    the largest value, booleans with their opposite). As a real graph repeats only recorded work, a
    call raises GraphStateError if a module below the layer has got other hooks, children or another
    mode (``train()``, ``eval()``) since the capture. Hooks that it had at the capture run, while a
    real graph would repeat only their work on tensors.

    Args:
        strict: Make all checks. False omits those of gradients, of calls in flight, of random
            streams and of modules below, and outputs are not overwritten.

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
        """Return one callable for each spec. Runs no warm-ups."""
        replay_of = _EagerReplay if self.strict else _replay_eagerly
        return [CheckedGraph(spec, replay_of(spec), strict=self.strict) for spec in specs]


def _replay_eagerly(spec: GraphSpec) -> Callable[[GraphCall], Any]:
    return lambda call: spec.fn(*call.args, **call.kwargs)


class _EagerReplay:
    """Runs a function each time. The next call overwrites the outputs."""

    def __init__(self, spec: GraphSpec) -> None:
        self._function = spec.fn
        self._outputs: list[torch.Tensor] = []
        # Weak: a graph must not keep a layer alive.
        self._layer = weakref.ref(spec.module)
        self._recorded = weakref.WeakKeyDictionary(_describe_modules(spec.module))
        self._num_recorded = len(self._recorded)  # a module that was removed may be gone

    def __call__(self, call: GraphCall) -> Any:
        self._refuse_changes()
        args = [self._copy_input(tensor) for tensor in call.args]
        kwargs = {name: self._copy_input(tensor) for name, tensor in call.kwargs.items()}
        with refusing_plain_forks():
            outputs = self._function(*args, **kwargs)
        for last in self._outputs:
            _overwrite(last)
        self._outputs = []
        return conversion_helper(outputs, self._copy_output)

    def _refuse_changes(self) -> None:
        layer = self._layer()
        present = {} if layer is None else _describe_modules(layer)
        if layer is None or (
            present == dict(self._recorded) and len(present) == self._num_recorded
        ):
            return
        names = {module: name or "the layer itself" for name, module in layer.named_modules()}
        changed = [names[one] for one in present if present[one] != self._recorded.get(one)]
        change = (
            f"{', '.join(changed)} of {type(layer).__name__} has another mode or other hooks than "
            "at the capture, or is new"
            if changed
            else f"a module of {type(layer).__name__} was removed after the capture"
        )
        raise GraphStateError(
            f"{change}. A replay would run as captured. Undo the change or make a new capture"
        )

    def _copy_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy an input that is an output of the last call, as a graph does before it runs."""
        storages = {output.untyped_storage().data_ptr() for output in self._outputs}
        return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor

    def _copy_output(self, leaf: Any) -> Any:
        """Copy an output, which may be an input, a parameter or a tensor that the layer keeps."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copied = leaf.clone()
        self._outputs.append(copied.detach())
        return copied


def _describe_modules(layer: torch.nn.Module) -> dict[torch.nn.Module, tuple[Any, ...]]:
    """Return the mode of each module of a layer, with the numbers of its hooks.

    Without hooks of the layer itself: no graph runs them, and its caller runs or refuses them.
    """
    described = {
        module: (module.training, *(tuple(getattr(module, hooks)) for hooks in _HOOKS))
        for module in iter_modules(layer)
    }
    return described | {layer: (layer.training,)}


# Torch counts hooks: a number is used only once.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _overwrite(tensor: torch.Tensor) -> None:
    # An inference tensor may be written only in inference mode, other tensors only outside.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
