"""Models as lists of chunks, one for each virtual pipeline stage of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from mcore.modules.module import MegatronModule

__all__ = ["ModelHook", "ModelList", "ensure_model_list"]

ModelList: TypeAlias = list[MegatronModule]
ModelHook: TypeAlias = Callable[[ModelList], "ModelList | None"]


def ensure_model_list(model: Any) -> ModelList:
    """Return a model or several as a list.

    Args:
        model: A model, or a list or tuple of models.

    Returns:
        The same list for a list, a new one otherwise.

    Raises:
        TypeError: ``model`` is None.

    Example:
        >>> ensure_model_list("model"), ensure_model_list(("a", "b"))
        (['model'], ['a', 'b'])
    """
    if model is None:
        raise TypeError("model is None; give a model or a list of models")
    if isinstance(model, list):
        return model
    return list(model) if isinstance(model, tuple) else [model]


# The documented name.
_ensure_model_list = ensure_model_list
