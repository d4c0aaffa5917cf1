"""The ``shared`` mark of parameters that several modules hold, such as tied word embeddings."""

from __future__ import annotations

from typing import Any


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
