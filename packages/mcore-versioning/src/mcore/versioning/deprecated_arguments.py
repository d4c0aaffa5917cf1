"""Arguments that a function no longer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from mcore.versioning.deprecated_functions import blaming_one_further
from mcore.versioning.signatures import accepts_parameter
from mcore.versioning.wrapping import (
    display_name,
    mark_if_coroutine_function,
    through_descriptor,
)

F = TypeVar("F", bound="Callable[..., Any]")


def deprecate_args(
    *names: str,
    message: str = "Argument '{name}' has been deprecated and should not be used.",
) -> Callable[[F], F]:
    """Refuse calls that pass one of the named arguments, by keyword or by position.

    Args:
        *names: Parameters of the decorated function, or any names if it takes `**kwargs`.
        message: The text of the error, with `{name}` in the place of the argument.

    Returns:
        A decorator that keeps the signature.

    Raises:
        TypeError: At a call: an argument of that name is given; the one that comes first in
            `names` is reported. At decoration: `names` holds something other than names.
        ValueError: At decoration: no names, or one that the function can't be given.

    Example:
        >>> @deprecate_args("eps", message="{name} has moved to the optimizer")
        ... def step(lr, eps=None):
        ...     return lr
        >>> step(0.1)
        0.1
        >>> step(0.1, eps=1e-8)
        Traceback (most recent call last):
            ...
        TypeError: eps has moved to the optimizer
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"the arguments of @deprecate_args are names in quotes, not {names!r}")
    if not names:
        raise ValueError('@deprecate_args needs the names of the arguments, as in ("eps",)')
    texts = {name: message.format(name=name) for name in names}

    def refuse_arguments(func: Callable[..., Any]) -> Callable[..., Any]:
        positions = _positions(func, texts)
        inner = blaming_one_further(func)

        @wraps(func)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            for name, text in texts.items():
                if name in kwargs or positions.get(name, len(args)) < len(args):
                    raise TypeError(text)
            return inner(*args, **kwargs)

        mark_if_coroutine_function(refusing, func)
        return refusing

    return lambda target: through_descriptor(target, refuse_arguments)


def _positions(func: Callable[..., Any], names: Mapping[str, str]) -> dict[str, int]:
    """Where each name stands among the positional parameters; names without a place are left out.

    Raises:
        ValueError: A name can't be passed to the function at all.
    """
    import inspect

    unknown = [name for name in names if not accepts_parameter(func, name)]
    if unknown:
        raise ValueError(
            f"{display_name(func)} has no parameter {', '.join(unknown)} and takes no **kwargs; "
            "name parameters that a call could pass"
        )
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(func).parameters.values()
    order = [p.name for p in parameters if p.kind in by_position]
    return {name: order.index(name) for name in names if name in order}
