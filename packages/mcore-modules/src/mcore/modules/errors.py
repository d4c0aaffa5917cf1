"""The errors of this package that callers may catch."""

from __future__ import annotations


class ConfigFieldError(AttributeError, ValueError):
    """A configuration object lacks a field that is needed and has no default.

    Example:
        >>> from types import SimpleNamespace
        >>> from mcore.modules import ConfigFieldError
        >>> from mcore.modules.config import read_field
        >>> try:
        ...     read_field(SimpleNamespace(), "hidden_size")
        ... except ConfigFieldError as error:
        ...     print(error)
        SimpleNamespace has no field 'hidden_size', and there is no default for it. Set it
    """


class AttributeNotFoundError(RuntimeError):
    """Neither a model nor any model inside its wrappers has an attribute.

    Example:
        >>> import torch
        >>> from mcore.modules import AttributeNotFoundError, get_attr_wrapped_model
        >>> try:
        ...     get_attr_wrapped_model(torch.nn.Identity(), "model_type")
        ... except AttributeNotFoundError as error:
        ...     print("model_type" in str(error))
        True
    """


class ModelListError(RuntimeError, TypeError):
    """A list or tuple of models was given where one model is expected.

    Example:
        >>> from mcore.modules import ModelListError, get_model_config
        >>> try:
        ...     get_model_config([])
        ... except ModelListError as error:
        ...     print("one model" in str(error))
        True
    """


class GraphStateError(RuntimeError):
    """The state of a graph does not allow a request, for example a replay before its capture."""


class GraphInputMismatch(ValueError):  # noqa: N818 - a documented name
    """A graph is called with inputs that differ from the captured inputs."""
