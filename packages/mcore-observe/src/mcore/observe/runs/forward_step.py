"""Injection of the state into forward-step functions with a parameter for it."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, ForwardRef, Union, get_args, get_origin

from mcore.versioning.signatures import signature_of

_STATE_CLASS = "GlobalState"
_STATE_NAMES = ("state", "global_state")
_IDENTIFIER = re.compile(rf"(?<!\w){_STATE_CLASS}(?!\w)")


def needs_global_state_injection(forward_step_func: Callable[..., Any]) -> bool:
    """Return whether a forward-step function has a parameter for the state.

    This is a parameter annotated with a class named ``GlobalState``, even as a string, in a union,
    ``Optional`` or ``Annotated``. Without such an annotation it is the first parameter if its name
    is ``state`` or ``global_state``. Parameters that a ``partial`` has bound do not count.

    Args:
        forward_step_func: A function, method, partial or callable object.

    Returns:
        Whether it has one. False for callables that cannot be inspected.

    Example:
        >>> needs_global_state_injection(lambda state, data_iterator, model: None)
        True
        >>> needs_global_state_injection(lambda data_iterator, model: None)
        False
    """
    return _find_state_parameter(forward_step_func) is not None


def maybe_inject_state(
    forward_step_func: Callable[..., Any], state: Any, needs_injection: bool | None = None
) -> Callable[..., Any]:
    """Bind the state to a function with a parameter for it.

    Args:
        forward_step_func: A function, method, partial or callable object.
        state: The state. Every call gets the same object, with its changes.
        needs_injection: The result of :func:`needs_global_state_injection`. None calls it.

    Returns:
        The function without its parameter for the state, or the function itself.

    Example:
        >>> maybe_inject_state(lambda state, model: (state, model), "the state")("the model")
        ('the state', 'the model')
    """
    if needs_injection is False:
        return forward_step_func
    found = _find_state_parameter(forward_step_func)
    if found is None:
        if needs_injection is None:
            return forward_step_func
        return functools.partial(forward_step_func, state)
    index, parameter = found
    if parameter.kind is parameter.KEYWORD_ONLY:
        return functools.partial(forward_step_func, **{parameter.name: state})
    if index == 0:
        return functools.partial(forward_step_func, state)

    def call_with_state(*args: Any, **kwargs: Any) -> Any:
        if len(args) >= index:
            return forward_step_func(*args[:index], state, *args[index:], **kwargs)
        # Fewer positional arguments are given.
        return forward_step_func(*args, **kwargs, **{parameter.name: state})

    return call_with_state


def prepare_forward_step_func(
    forward_step_func: Callable[..., Any], state: Any
) -> Callable[..., Any]:
    """Bind the state to a function if it has a parameter for the state.

    Call it once, before the loop.

    Args:
        forward_step_func: A function, method, partial or callable object.
        state: The state.

    Returns:
        As for :func:`maybe_inject_state`.

    Example:
        >>> def forward_step(data_iterator, model):
        ...     return model
        >>> prepare_forward_step_func(forward_step, "the state") is forward_step
        True
    """
    return maybe_inject_state(forward_step_func, state)


def _find_state_parameter(
    forward_step_func: Callable[..., Any],
) -> tuple[int, inspect.Parameter] | None:
    """Return the position and the parameter for the state."""
    try:
        signature = signature_of(forward_step_func)
    except (TypeError, ValueError):  # built-in functions may have none
        return None
    bound = getattr(forward_step_func, "keywords", None) or {}
    parameters = [
        (index, parameter)
        for index, parameter in enumerate(signature.parameters.values())
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if any(_is_state_class(p.annotation) for _, p in parameters if p.name in bound):
        return None
    for index, parameter in parameters:
        if _is_state_class(parameter.annotation):
            return index, parameter
    if parameters and parameters[0][1].name in _STATE_NAMES and parameters[0][1].name not in bound:
        return parameters[0]
    return None


def _is_state_class(annotation: Any) -> bool:
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _IDENTIFIER.search(annotation) is not None
    if get_origin(annotation) is Annotated:
        return _is_state_class(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_is_state_class(part) for part in get_args(annotation))
    return isinstance(annotation, type) and annotation.__name__ == _STATE_CLASS
