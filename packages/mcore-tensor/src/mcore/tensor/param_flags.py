"""Marks of parameters: shared by several modules, or gathered late by a backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PARAM_READY_CALLBACK_ATTR = "_ensure_param_ready_callback"


def param_is_shared(param: object) -> bool:
    """Return whether a parameter is marked as a copy of another module's parameter.

    The mark is a truthy attribute ``shared``. Any object is accepted.

    Example:
        >>> import torch
        >>> param_is_shared(torch.nn.Parameter(torch.ones(2)))
        False
    """
    return bool(getattr(param, "shared", False))


def param_is_not_shared(param: object) -> bool:
    """Return whether a parameter counts in norms: it is not marked as a copy.

    Models mark the copy of tied weights (for example the word embeddings of the last pipeline
    stage). A sum over all parameters then counts the weight once.

    Example:
        >>> import torch
        >>> param_is_not_shared(torch.nn.Parameter(torch.ones(2)))
        True
    """
    return not param_is_shared(param)


def mark_param_shared(param: Any, shared: bool = True) -> None:
    """Mark a parameter as a copy of another module's parameter, or remove the mark.

    The mark is set as the attribute ``shared``.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> mark_param_shared(weight)
        >>> param_is_not_shared(weight)
        False
    """
    param.shared = bool(shared)


def ensure_params_ready(params: Iterable[object]) -> None:
    """Let a backend that gathers parameters late complete them, before anyone reads their values.

    Calls the callables that such parameters have as ``_ensure_param_ready_callback``, each once, in
    the order of the parameters. Parameters without it are left alone. A callback may communicate:
    all ranks that share parameters call this together.

    Args:
        params: Parameters, such as ``module.parameters()``.

    Example:
        >>> import torch
        >>> param = torch.nn.Parameter(torch.zeros(1))
        >>> param._ensure_param_ready_callback = lambda: print("gathered")
        >>> ensure_params_ready([param, param])
        gathered
    """
    callbacks = [getattr(param, PARAM_READY_CALLBACK_ATTR, None) for param in params]
    for callback in dict.fromkeys(callbacks):
        if callback is not None:
            callback()
