"""Freezing parameters: by name, and in the routers of mixture-of-experts layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import torch

from mcore.modules.wrappers import (
    ModelList,
    ensure_model_list,
    is_data_parallel_wrapper,
    iter_wrapped_models,
    pipeline_size,
)
from mcore.parallel.checkpoint.builders import strip_wrapper_names
from mcore.versioning import internal_api

logger = logging.getLogger(__name__)


def freeze_parameters(model: Any, patterns: str | Iterable[str]) -> ModelList:
    """Stop the training of parameters with matching names, in place.

    Names are those of ``named_parameters()`` of a chunk or of a model inside its wrappers. Logs the
    number of frozen parameters. Logs a warning if a chunk is already wrapped for data parallelism,
    since the wrapper may wait for their gradients. May be called repeatedly. No communication.

    Args:
        model: A model or a list of chunks, wrapped or not.
        patterns: One or more shell-style patterns for whole names, such as
            ``"decoder.layers.0.*"``.

    Returns:
        The list of the given chunks.

    Raises:
        ValueError: A pattern matches no parameter of any chunk. Nothing is frozen then. With
            several pipeline stages it is only logged, since another stage may have the parameter.
        TypeError: ``model`` is None, or a pattern is not a string.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> _ = freeze_parameters(model, "0.*")
        >>> [parameter.requires_grad for parameter in model.parameters()]
        [False, False, True, True]
    """
    chunks = ensure_model_list(model)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern is a {type(pattern).__name__}. Pass strings")
    named = [pair for chunk in chunks for pair in _iterate_named_parameters(chunk)]
    for pattern in wanted or ["(no pattern)"]:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            _refuse_nothing_found(chunks, f"the pattern {pattern!r} matches no parameter")
    matched = [p for name, p in named if any(fnmatchcase(name, pattern) for pattern in wanted)]
    _freeze(chunks, matched, "parameters")
    return chunks


def freeze_moe_router(model: Any) -> ModelList:
    """Stop the training of routers and of shared experts' gates, in place.

    Freezes, in every module below a chunk and inside all wrappers: all parameters of ``router``
    except ``expert_bias``, the parameters ``gate_weight`` and ``gate_bias``, and in modules with
    ``experts``, as in transformers, the parameters of ``gate`` and ``shared_expert_gate``. These
    may be in decoders, hybrid stacks and layers for multi-token prediction. Logs the number of
    frozen parameters. Logs a warning if a chunk is already wrapped for data parallelism, since the
    wrapper may wait for their gradients. May be called repeatedly. No communication.

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
    parts = [part for chunk in chunks for part in _iterate_parts(chunk)]
    found = [parameter for part in parts for parameter in _find_routing_parameters(part)]
    if not found:
        logger.warning("no module has a router or a gate_weight, so no router is frozen")
    _freeze(chunks, found, "routing parameters")
    return chunks


@internal_api
def _freeze_parameter_if_present(module: object, name: str) -> None:
    """Stop the training of a module's parameter, if present. TypeError if it is not a tensor."""
    for parameter in _find_parameter(module, name):
        parameter.requires_grad_(False)


def _freeze(chunks: ModelList, parameters: Iterable[torch.Tensor], kind: str) -> None:
    distinct = {id(parameter): parameter for parameter in parameters}
    for index, chunk in enumerate(chunks):
        if any(is_data_parallel_wrapper(one) for one in iter_wrapped_models(chunk)):
            logger.warning(
                "chunk %d is already wrapped for data parallelism, and the wrapper may wait for "
                "the gradients of frozen parameters. Freeze before wrapping",
                index,
            )
    for parameter in distinct.values():
        parameter.requires_grad_(False)
    logger.info("froze %d %s of %d chunks", len(distinct), kind, len(chunks))


def _refuse_nothing_found(chunks: ModelList, reason: str) -> None:
    """Raise ValueError, unless another pipeline stage may have the missing parameters."""
    if any(pipeline_size(chunk) > 1 for chunk in chunks):
        logger.warning("%s of this pipeline stage", reason)
        return
    names = ", ".join(type(chunk).__name__ for chunk in chunks)
    raise ValueError(
        f"{reason} of {names or 'an empty list'}, so nothing would be frozen. Look at the "
        "names of named_parameters()"
    )


def _iterate_named_parameters(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for model in iter_wrapped_models(chunk):
        if isinstance(model, torch.nn.Module):
            for name, parameter in model.named_parameters():
                yield strip_wrapper_names(name), parameter


def _iterate_parts(chunk: Any) -> Iterator[Any]:
    """Yield a chunk and everything below it, once each, plain namespaces included."""
    seen: set[int] = set()
    pending: list[Any] = list(iter_wrapped_models(chunk))
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple)):
            pending.extend(part)
        elif isinstance(part, (torch.nn.Module, SimpleNamespace)):
            yield part
            pending.extend(getattr(part, "_modules", {}).values())
            pending.extend(vars(part).values())


def _find_routing_parameters(part: Any) -> Iterator[torch.Tensor]:
    names = ["router"]
    if getattr(part, "experts", None) is not None:  # the names of transformers
        names += ["gate", "shared_expert_gate"]
    for name in names:
        router = getattr(part, name, None)
        if isinstance(router, torch.nn.Module):
            # expert_bias balances the load. It is updated by counts, not by gradients.
            named = router.named_parameters()
            yield from (p for path, p in named if path.rpartition(".")[2] != "expert_bias")
        else:
            yield from _find_parameter(router, "weight")
            yield from _find_parameter(router, "bias")
    for name in ("gate_weight", "gate_bias"):
        yield from _find_parameter(part, name)


def _find_parameter(module: object, name: str) -> Iterator[torch.Tensor]:
    parameter = getattr(module, name, None)
    if parameter is None:
        return
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(
            f"{name} of {type(module).__name__} is a {type(parameter).__name__}, not a parameter"
        )
    yield parameter
