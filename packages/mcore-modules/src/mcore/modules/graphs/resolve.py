"""The choice of a graph runner for a configuration and a device."""

from __future__ import annotations

import functools
import logging

import torch

from mcore.modules.config_fields import is_switched_on, read_field
from mcore.modules.graphs.contract import GraphRunner
from mcore.modules.graphs.eager import EagerGraphRunner
from mcore.modules.graphs.te_runner import TEGraphRunner
from mcore.modules.graphs.torch_runner import TorchGraphRunner

__all__ = ["resolve_graph_runner"]

_logger = logging.getLogger(__name__)


def resolve_graph_runner(config: object, device: torch.device) -> GraphRunner:
    """Return the best graph runner that a device has.

    TransformerEngine's where the configuration asks for it with
    ``cuda_graph_impl="transformer_engine"`` and it is installed on a CUDA device; torch's on other
    CUDA and XPU devices; else eager running under the rules of graphs. Does not initialise a
    device. A choice below what the configuration asks for is logged, once per process.

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
    _logger.warning(
        "cuda_graph_impl is %r, but the %s graph runner is used: no better one is available on %s",
        impl,
        chosen,
        device_type,
    )
