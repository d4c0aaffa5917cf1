"""Models as lists of chunks, one for each virtual pipeline stage of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from mcore.modules.module import MegatronModule

__all__ = ["ModelHook", "ModelList", "ensure_model_list", "is_data_parallel_wrapper"]

ModelList: TypeAlias = list[MegatronModule]
ModelHook: TypeAlias = Callable[[ModelList], "ModelList | None"]

_DATA_PARALLEL_NAMES = frozenset(
    {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
)


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


def is_data_parallel_wrapper(model: object) -> bool:
    """Return whether a model is wrapped for data parallelism, by torch or by Megatron-LM.

    Decided by the names of the classes, so that none has to be imported.

    Args:
        model: A model.

    Returns:
        True or False.

    Example:
        >>> import torch
        >>> is_data_parallel_wrapper(torch.nn.DataParallel(torch.nn.Identity()))
        True
    """
    return any(cls.__name__ in _DATA_PARALLEL_NAMES for cls in type(model).__mro__)
