"""The wrappers around a model in training, and functions to search and remove them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from mcore.modules.config import read_field
from mcore.modules.module import MegatronModule
from mcore.modules.traversal import has_own_attribute, iter_modules
from mcore.parallel.checkpoint.builders import MEGATRON_WRAPPERS, is_of_megatron
from mcore.parallel.groups import get_pg_size
from mcore.parallel.process_groups import get_default_process_groups

# Module and class of the usual wrappers, and the attribute that holds the model. A module that is
# not imported has no instances, so no module is imported for the check.
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
    {"DataParallel", "FSDPModule"} | MEGATRON_WRAPPERS - {"Float16Module"}
)
# Children of wrappers that forward every attribute that they lack.
_FORWARDING = frozenset({"_orig_mod", "_fsdp_wrapped_module"})

ModelList: TypeAlias = list[MegatronModule]
# A function such as that of create_value_head_hook: changes chunks, and may return others.
ModelHook: TypeAlias = "Callable[[ModelList], ModelList | None]"


class AttributeNotFoundError(RuntimeError):
    """Neither a model nor any model inside its wrappers has an attribute.

    Example:
        >>> import torch
        >>> try:
        ...     get_attr_wrapped_model(torch.nn.Identity(), "model_type")
        ... except AttributeNotFoundError as error:
        ...     print("model_type" in str(error))
        True
    """


class ModelListError(RuntimeError, TypeError):
    """A list or tuple of models was given instead of one model.

    Example:
        >>> try:
        ...     get_model_config([])
        ... except ModelListError as error:
        ...     print("one model" in str(error))
        True
    """


class ModelType(enum.Enum):
    """The kind of a model, its attribute ``model_type``.

    Example:
        >>> ModelType.encoder_or_decoder.value
        1
    """

    encoder_or_decoder = 1


def register_model_wrapper(cls: type, attr: str = "module") -> None:
    """Add a class to the wrappers that :func:`unwrap_model` removes by default.

    Args:
        cls: The wrapper class.
        attr: The attribute of its instances that holds the model.

    Raises:
        TypeError: ``cls`` is not a class.
        ValueError: It is already registered with another attribute.

    Example:
        >>> class Wrapper:
        ...     def __init__(self, inner):
        ...         self.inner = inner
        >>> register_model_wrapper(Wrapper, attr="inner")
        >>> unwrap_model(Wrapper("model"))
        'model'
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls is {cls!r}. Pass a class")
    if _registered_wrappers.setdefault(cls, attr) != attr:
        raise ValueError(
            f"{cls.__name__} is registered with attribute {_registered_wrappers[cls]!r}, not "
            f"{attr!r}. Register it once"
        )


def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """Remove the wrappers around a model, or around each of a list or tuple of models.

    Args:
        model: A model, or a list or tuple of models.
        module_instances: The class or classes to remove. Default: Float16Module,
            DistributedDataParallel, FullyShardedDataParallel, DataParallel, AveragedModel, models
            of torch.compile, the wrappers of Megatron-LM and Megatron-FSDP (by name), and classes
            of :func:`register_model_wrapper`. ``()`` removes none.

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
    if isinstance(model, (list, tuple)):
        unwrapped = [unwrap_model(one, module_instances) for one in model]
        return tuple(unwrapped) if isinstance(model, tuple) else unwrapped
    wrappers = _list_default_wrappers()
    visited = set()
    while (
        isinstance(model, tuple(wrappers)) or is_of_megatron(model, MEGATRON_WRAPPERS)
        if module_instances is None
        else isinstance(model, module_instances)
    ):
        if id(model) in visited:
            raise RuntimeError(f"a {type(model).__name__} wraps itself and holds no model")
        visited.add(id(model))
        attr = next((name for cls, name in wrappers.items() if isinstance(model, cls)), "module")
        model = getattr(model, attr)
    return model


def find_megatron_fsdp(model: Any) -> Any:
    """Return the first MegatronFSDP of a model and the models inside it, or None without one.

    The class is known by its name and package. Nothing is imported.

    Args:
        model: One model, wrapped or not.

    Raises:
        RuntimeError: A wrapper contains itself.

    Example:
        >>> import torch
        >>> find_megatron_fsdp(torch.nn.Linear(1, 1)) is None
        True
    """
    found = (one for one in iter_wrapped_models(model) if is_of_megatron(one, {"MegatronFSDP"}))
    return next(found, None)


def get_attr_wrapped_model(
    model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Return an attribute of a model or of the model inside its wrappers.

    Searches ``model``, then its ``module`` (``_orig_mod`` for a model of torch.compile), and so on,
    and stops at the first object that has the attribute.

    Args:
        model: One model, wrapped or not.
        attr: The attribute's name.
        allow_none: Return an attribute that is None. If False, continue to the first that is not.
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
            f"{attr!r}. Pass its elements one by one"
        )
    if model is None:
        raise AttributeNotFoundError(f"model is None and has no attribute {attr!r}. Pass a model")
    visited = []
    for owner in iter_wrapped_models(model):
        visited.append(type(owner).__name__)
        if has_own_attribute(owner, attr) or (not _is_forwarding(owner) and hasattr(owner, attr)):
            value = getattr(owner, attr)
            if allow_none or value is not None:
                return owner if return_model_obj else value
    raise AttributeNotFoundError(
        f"no {'' if allow_none else 'non-None '}attribute {attr!r} in {' -> '.join(visited)}. "
        "Set it on the model"
    )


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
    """Return whether a model, wrapped or not, has cross-attention: its ``xattn_needed``.

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
    """Return whether a module is below another module, by identity.

    Args:
        module: The module to look for.
        parent_module: The module to search.
        strict: Return False if both are the same module.

    Example:
        >>> import torch
        >>> parent = torch.nn.Sequential(torch.nn.Identity())
        >>> is_submodule(parent[0], parent), is_submodule(parent, parent)
        (True, False)
    """
    if module is parent_module:
        return not strict
    return any(module is below for below in iter_modules(parent_module))


def ensure_model_list(model: Any) -> ModelList:
    """Return one or several models as a list, a list itself unchanged.

    Args:
        model: A model, or a list or tuple of models.

    Raises:
        TypeError: ``model`` is None.

    Example:
        >>> ensure_model_list("model")
        ['model']
    """
    if model is None:
        raise TypeError("model is None. Pass a model or a list of models")
    if isinstance(model, list):
        return model
    return list(model) if isinstance(model, tuple) else [model]


# The public name.
_ensure_model_list = ensure_model_list


def iter_wrapped_models(model: Any) -> Iterator[Any]:
    """Yield a model, the model inside it, and so on. RuntimeError if a model contains itself."""
    visited: dict[int, Any] = {}
    while model is not None:
        if id(model) in visited:
            raise RuntimeError(
                f"a {type(model).__name__} contains itself through its attribute 'module'. Remove "
                "the cycle"
            )
        visited[id(model)] = model
        yield model
        # Registered wrappers first: they may have a child `module` that is not the model.
        registered = (attr for cls, attr in _registered_wrappers.items() if isinstance(model, cls))
        attrs = (*registered, "module", "_orig_mod")
        held = next((attr for attr in attrs if has_own_attribute(model, attr)), None)
        model = None if held is None else getattr(model, held)


def is_data_parallel_wrapper(model: object) -> bool:
    """Return whether a model is a data-parallel wrapper of torch or Megatron-LM, by class name."""
    return any(cls.__name__ in _DATA_PARALLEL_NAMES for cls in type(model).__mro__)


def refuse_data_parallel(chunks: ModelList) -> None:
    """Raise TypeError for a chunk that is wrapped for data parallelism, before new parameters."""
    for chunk in chunks:
        for model in iter_wrapped_models(chunk):
            if is_data_parallel_wrapper(model):
                raise TypeError(
                    f"a chunk is wrapped in {type(model).__name__}, which would ignore the new "
                    "parameters. Change the model before wrapping"
                )


def find_group(name: str, model: Any, *sources: Any) -> Any:
    """Return a group from the first source that has it, else from the model or the default."""
    of_model = find_in_wrapped_models(model, "pg_collection")
    collections = (*sources, of_model, get_default_process_groups())
    found = (getattr(collection, name, None) for collection in collections)
    return next((group for group in found if group is not None), None)


def configured_size(model: Any, name: str) -> int:
    """Return a parallel size in a model's configuration, 1 if the field is missing."""
    size = read_field(find_in_wrapped_models(model, "config"), f"{name}_model_parallel_size", None)
    return size or 1


def pipeline_size(model: Any) -> int:
    """Return the number of pipeline stages, from the model's group or else its configuration."""
    group = find_group("pp", model)
    return configured_size(model, "pipeline") if group is None else get_pg_size(group)


def find_in_wrapped_models(model: Any, attr: str) -> Any:
    """Return the first non-None value of an attribute of a model and the models inside it."""
    try:
        return get_attr_wrapped_model(model, attr, allow_none=False)
    except AttributeNotFoundError:
        return None


def _is_forwarding(owner: Any) -> bool:
    """Return whether a wrapper forwards missing attributes. The model inside is their owner."""
    return isinstance(owner, torch.nn.Module) and not _FORWARDING.isdisjoint(owner._modules)


def _list_default_wrappers() -> dict[type, str]:
    known = {
        getattr(sys.modules[module], name): attr
        for module, name, attr in _KNOWN_WRAPPERS
        if hasattr(sys.modules.get(module), name)
    }
    return known | _registered_wrappers
