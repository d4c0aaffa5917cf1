"""Signatures of callables: extending them and asking what they accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect


def create_updated_function_signature(
    original_function: Callable[..., Any], **extended_kwargs: Any
) -> inspect.Signature:
    """The signature of a function with further keyword-only parameters.

    Assign it to `__signature__` of a wrapper that takes these arguments, so that `help()`, editors
    and callers that look at the signature see them.

    Args:
        original_function: Its parameters and its return annotation are kept; `self` of a bound
            method is left out.
        **extended_kwargs: Name and default of each new parameter, in this order; the annotation is
            the type of the default. A default of None brings no annotation, and
            `inspect.Parameter.empty` makes the parameter required and brings none either.

    Returns:
        The new signature, with the new parameters before a `**kwargs` parameter.

    Raises:
        ValueError: A name is already a parameter of the function, or the function has no
            signature that could be found out.

    Example:
        >>> def scale(x, factor=1, **options): ...
        >>> print(create_updated_function_signature(scale, verbose=True, log=None))
        (x, factor=1, *, verbose: bool = True, log=None, **options)
    """
    import inspect

    try:
        signature = inspect.signature(original_function)
    except ValueError as error:
        raise ValueError(f"{original_function!r} has no signature that can be extended") from error
    present = list(signature.parameters.values())
    taken = [name for name in extended_kwargs if name in signature.parameters]
    if taken:
        raise ValueError(
            f"{original_function!r} already has the parameter {', '.join(taken)}; "
            "choose other names for the new ones"
        )
    added = [_keyword_only(name, default) for name, default in extended_kwargs.items()]
    end = len(present)
    if present and present[-1].kind is inspect.Parameter.VAR_KEYWORD:
        end -= 1
    return signature.replace(parameters=[*present[:end], *added, *present[end:]])


def accepts_parameter(func: Callable[..., Any], name: str) -> bool:
    """Whether a call may pass `name` as a keyword, or by position where it is positional-only.

    Args:
        func: A callable with a signature.
        name: The name of a parameter; those of `*args` and `**kwargs` themselves don't count.

    Returns:
        True if `func` has that parameter, or takes `**kwargs`.

    Raises:
        ValueError: `func` has no signature that could be found out.

    Example:
        >>> def step(x, *, scale=1.0): ...
        >>> accepts_parameter(step, "scale"), accepts_parameter(step, "offset")
        (True, False)
    """
    import inspect

    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(func).parameters
    if name in parameters and parameters[name].kind not in collecting:
        return True
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _keyword_only(name: str, default: Any) -> inspect.Parameter:
    import inspect

    empty = inspect.Parameter.empty
    annotation = empty if default is None or default is empty else type(default)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
