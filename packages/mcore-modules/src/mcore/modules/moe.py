"""Freezing the routers of mixture-of-experts layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from mcore.modules.traversal import iter_modules
from mcore.modules.wrappers import (
    ModelList,
    ensure_model_list,
    is_data_parallel_wrapper,
    iter_wrapped_models,
    unwrap_model,
)
from mcore.versioning import internal_api

logger = logging.getLogger(__name__)

# Below a layer: the module and the parameters that decide where tokens go.
_ROUTING = (
    ("mlp.router", ("weight", "bias")),
    ("mlp.shared_experts", ("gate_weight", "gate_bias")),
)


def freeze_moe_router(model: Any) -> ModelList:
    """Stop the training of routers and of shared experts' gates, in place.

    Covers the layers of ``decoder`` and ``language_model.decoder``, and the layers for
    multi-token prediction, ``mtp``. Layers without a router are left alone, as is a router's
    ``expert_bias``. Logs the number of frozen parameters, and warns about a chunk whose routers lie
    elsewhere and about one that is wrapped for data parallelism already, whose gradient reduction
    may wait for the frozen parameters. May be called again.

    Args:
        model: A model or a list of chunks, wrapped or not.

    Returns:
        The list of the given chunks.

    Raises:
        TypeError: ``model`` is None, or one of those names is not a tensor.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> router = torch.nn.Linear(4, 2)
        >>> layer = SimpleNamespace(mlp=SimpleNamespace(router=router))
        >>> model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))
        >>> freeze_moe_router(model) == [model], router.weight.requires_grad
        (True, False)
    """
    chunks = ensure_model_list(model)
    for index, chunk in enumerate(chunks):
        if any(is_data_parallel_wrapper(one) for one in iter_wrapped_models(chunk)):
            logger.warning(
                "chunk %d is wrapped for data parallelism already, whose reduction may wait for "
                "the gradients of frozen parameters; freeze before wrapping",
                index,
            )
        inner = unwrap_model(chunk)
        frozen = sum(_freeze_layer(layer) for layer in _layers(inner))
        logger.info("froze %d routing parameters of chunk %d", frozen, index)
        if not frozen and _has_router(inner):
            logger.warning("chunk %d has a router, but none was found in its layers", index)
    return chunks


def _layers(model: Any) -> Iterator[Any]:
    for root in (model, getattr(model, "language_model", None)):
        yield from getattr(getattr(root, "decoder", None), "layers", None) or ()
        for layer in getattr(getattr(root, "mtp", None), "layers", None) or ():
            yield getattr(layer, "mtp_model_layer", None)


def _freeze_layer(layer: Any) -> int:
    """Freeze a layer's routing parameters and return how many there are."""
    count = 0
    for path, names in _ROUTING:
        module = layer
        for part in path.split("."):
            module = getattr(module, part, None)
        for name in names:
            _freeze_parameter_if_present(module, name)
            if getattr(module, name, None) is not None:
                count += 1
    return count


@internal_api
def _freeze_parameter_if_present(module: object, name: str) -> None:
    """Stop the training of a module's parameter, if present; TypeError if it is not a tensor."""
    parameter = getattr(module, name, None)
    if parameter is None:
        return
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(
            f"{name} of {type(module).__name__} is a {type(parameter).__name__}, not a parameter"
        )
    parameter.requires_grad_(False)


def _has_router(model: Any) -> bool:
    if not isinstance(model, torch.nn.Module):
        return False
    return any(getattr(module, "router", None) is not None for module in iter_modules(model))
