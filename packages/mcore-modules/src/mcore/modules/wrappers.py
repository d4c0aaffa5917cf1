"""The wrappers that training puts around a model: walking through them and stripping them off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "has_itself",
    "is_data_parallel_wrapper",
    "iter_wrapped_models",
    "register_model_wrapper",
    "unwrap_model",
]

# Where the usual wrappers live, with the attribute that holds the model. A module that is not
# imported has no instances, so none is imported for the question.
_KNOWN_WRAPPERS = (
    ("mcore.modules.float16", "Float16Module", "module"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
)
_registered_wrappers: dict[type, str] = {}
_DATA_PARALLEL_NAMES = frozenset(
    {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
)


def register_model_wrapper(cls: type, attr: str = "module") -> None:
    """Let :func:`unwrap_model` strip one more class by default.

    Args:
        cls: The wrapper class.
        attr: The attribute of its instances that holds the model.

    Raises:
        TypeError: ``cls`` is no class.
        ValueError: It is registered with another attribute already.

    Example:
        >>> class Wrapper:
        ...     def __init__(self, inner):
        ...         self.inner = inner
        >>> register_model_wrapper(Wrapper, attr="inner")
        >>> unwrap_model(Wrapper("model"))
        'model'
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls is {cls!r}; give a class")
    if _registered_wrappers.setdefault(cls, attr) != attr:
        raise ValueError(
            f"{cls.__name__} is registered with attribute {_registered_wrappers[cls]!r}, not "
            f"{attr!r}; register it once"
        )


def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """Strip the wrappers off a model, or off each of a list or tuple of models.

    Args:
        model: A model, or a list or tuple of models.
        module_instances: The class or classes to strip. Default: Float16Module,
            DistributedDataParallel, FullyShardedDataParallel, DataParallel, AveragedModel, models
            of torch.compile and what :func:`register_model_wrapper` added. ``()`` strips nothing.

    Returns:
        A list for a list, a tuple for a tuple, else one model.

    Raises:
        RuntimeError: A wrapper contains itself.

    Example:
        >>> import torch
        >>> inner = torch.nn.Linear(3, 1)
        >>> unwrap_model([torch.nn.DataParallel(inner), inner]) == [inner, inner]
        True
    """
    wrappers = _default_wrappers()
    classes = tuple(wrappers) if module_instances is None else module_instances
    if isinstance(model, (list, tuple)):
        unwrapped = [_unwrap(one, classes, wrappers) for one in model]
        return tuple(unwrapped) if isinstance(model, tuple) else unwrapped
    return _unwrap(model, classes, wrappers)


def iter_wrapped_models(model: Any) -> Iterator[Any]:
    """Yield a model, the model inside it, and so on.

    Args:
        model: One model, wrapped or not.

    Yields:
        The model, then what its ``module`` (``_orig_mod`` for a model of torch.compile) is.

    Raises:
        RuntimeError: A wrapper contains itself.

    Example:
        >>> import torch
        >>> inner = torch.nn.Linear(3, 1)
        >>> list(iter_wrapped_models(torch.nn.DataParallel(inner)))[-1] is inner
        True
    """
    visited: dict[int, Any] = {}
    while model is not None:
        if id(model) in visited:
            raise RuntimeError(
                f"a {type(model).__name__} contains itself through its attribute 'module'; remove "
                "the cycle"
            )
        visited[id(model)] = model
        yield model
        model = _inner_model(model)


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


def has_itself(owner: Any, attr: str) -> bool:
    """Return whether an object has an attribute without asking a ``__getattr__`` of its own.

    Args:
        owner: A module, or any other object, which is asked as usual.
        attr: The attribute's name; parameters, buffers and children count.

    Returns:
        True or False.

    Example:
        >>> import torch
        >>> has_itself(torch.nn.Linear(2, 1), "weight")
        True
    """
    if not isinstance(owner, torch.nn.Module):
        return hasattr(owner, attr)
    places = (vars(owner), owner._parameters, owner._buffers, owner._modules)
    return any(attr in place for place in places) or hasattr(type(owner), attr)


def _unwrap(model: Any, classes: Any, wrappers: dict[type, str]) -> Any:
    visited = set()
    while isinstance(model, classes):
        if id(model) in visited:
            raise RuntimeError(f"a {type(model).__name__} wraps itself; it holds no model")
        visited.add(id(model))
        attr = next((name for cls, name in wrappers.items() if isinstance(model, cls)), "module")
        model = getattr(model, attr)
    return model


def _default_wrappers() -> dict[type, str]:
    known = {
        getattr(sys.modules[module], name): attr
        for module, name, attr in _KNOWN_WRAPPERS
        if hasattr(sys.modules.get(module), name)
    }
    return known | _registered_wrappers


def _inner_model(model: Any) -> Any:
    for attr in ("module", "_orig_mod"):
        if has_itself(model, attr):
            return getattr(model, attr)
    return None
