"""Questions about a model that may be inside wrappers such as DistributedDataParallel."""

from __future__ import annotations

import enum
from typing import Any

import torch

from mcore.modules.errors import AttributeNotFoundError, ModelListError
from mcore.modules.traversal import iter_modules
from mcore.modules.wrappers import has_itself, iter_wrapped_models

__all__ = [
    "ModelType",
    "find_in_wrapped_models",
    "get_attr_wrapped_model",
    "get_model_config",
    "get_model_type",
    "get_model_xattn",
    "is_submodule",
]

# Children of wrappers that hand on every attribute that they lack.
_HANDING_ON = frozenset({"_orig_mod", "_fsdp_wrapped_module"})


class ModelType(enum.Enum):
    """The kind of a model, its attribute ``model_type``.

    Example:
        >>> ModelType.encoder_or_decoder.value
        1
    """

    encoder_or_decoder = 1


def get_attr_wrapped_model(
    model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Return an attribute of a model or of the model inside its wrappers.

    Walks from ``model`` to its ``module`` (``_orig_mod`` for a model of torch.compile), and so on,
    and stops at the first object that has the attribute.

    Args:
        model: One model, wrapped or not.
        attr: The attribute's name.
        allow_none: Stop at an attribute that is None; otherwise walk on to the first that is not.
        return_model_obj: Return the object that has the attribute instead of its value.

    Returns:
        The value or its owner.

    Raises:
        AttributeNotFoundError: No object on the way has the attribute.
        ModelListError: ``model`` is a list or tuple.
        RuntimeError: A wrapper contains itself.

    Example:
        >>> import torch
        >>> inner = torch.nn.Linear(3, 1)
        >>> get_attr_wrapped_model(torch.nn.DataParallel(inner), "in_features")
        3
    """
    if isinstance(model, (list, tuple)):
        raise ModelListError(
            f"got a {type(model).__name__} of {len(model)} where one model is expected, to find "
            f"{attr!r}; give its elements one by one"
        )
    if model is None:
        raise AttributeNotFoundError(f"the model is None and has no attribute {attr!r}; give one")
    visited = []
    for owner in iter_wrapped_models(model):
        visited.append(type(owner).__name__)
        if _has(owner, attr):
            value = getattr(owner, attr)
            if allow_none or value is not None:
                return owner if return_model_obj else value
    raise AttributeNotFoundError(
        f"no {'' if allow_none else 'non-None '}attribute {attr!r} in {' -> '.join(visited)}; "
        "set it on the model"
    )


def find_in_wrapped_models(model: Any, attr: str) -> Any:
    """Return the first value of an attribute that is not None in a model and its wrappers.

    Args:
        model: One model, wrapped or not.
        attr: The attribute's name.

    Returns:
        The value, or None if there is none.

    Example:
        >>> import torch
        >>> find_in_wrapped_models(torch.nn.Identity(), "vp_stage") is None
        True
    """
    try:
        return get_attr_wrapped_model(model, attr, allow_none=False)
    except AttributeNotFoundError:
        return None


def get_model_type(model: Any) -> Any:
    """Return the attribute ``model_type`` of a model, wrapped or not.

    Args:
        model: One model.

    Returns:
        The value, usually a :class:`ModelType`.

    Raises:
        AttributeNotFoundError: There is none.
        ModelListError: ``model`` is a list or tuple.

    Example:
        >>> from types import SimpleNamespace
        >>> get_model_type(SimpleNamespace(model_type=ModelType.encoder_or_decoder)).name
        'encoder_or_decoder'
    """
    return get_attr_wrapped_model(model, "model_type")


def get_model_xattn(model: Any) -> Any:
    """Return the attribute ``xattn_needed`` of a model, wrapped or not: has it cross-attention?

    Args:
        model: One model.

    Returns:
        The value as stored, False if there is none.

    Raises:
        ModelListError: ``model`` is a list or tuple.

    Example:
        >>> from types import SimpleNamespace
        >>> get_model_xattn(SimpleNamespace())
        False
    """
    try:
        return get_attr_wrapped_model(model, "xattn_needed")
    except AttributeNotFoundError:
        return False


def get_model_config(model: Any) -> Any:
    """Return the configuration of a model, wrapped or not.

    Args:
        model: One model.

    Returns:
        The first ``config`` that is not None, from the outermost wrapper inwards.

    Raises:
        AttributeNotFoundError: There is none.
        ModelListError: ``model`` is a list or tuple.

    Example:
        >>> from types import SimpleNamespace
        >>> wrapper = SimpleNamespace(config=None, module=SimpleNamespace(config="inner"))
        >>> get_model_config(wrapper)
        'inner'
    """
    return get_attr_wrapped_model(model, "config", allow_none=False)


def is_submodule(
    module: torch.nn.Module, parent_module: torch.nn.Module, strict: bool = True
) -> bool:
    """Return whether a module is one of those below another, by identity.

    Args:
        module: The module to look for.
        parent_module: The module to look in.
        strict: Whether a module is no submodule of itself.

    Returns:
        True or False.

    Example:
        >>> import torch
        >>> parent = torch.nn.Sequential(torch.nn.Identity())
        >>> is_submodule(parent[0], parent), is_submodule(parent, parent)
        (True, False)
    """
    if module is parent_module:
        return not strict
    return any(module is below for below in iter_modules(parent_module))


def _has(owner: Any, attr: str) -> bool:
    if has_itself(owner, attr):
        return True
    # These hand on every attribute that they lack, so the owner is the model inside.
    hands_on = isinstance(owner, torch.nn.Module) and not _HANDING_ON.isdisjoint(owner._modules)
    return not hands_on and hasattr(owner, attr)
