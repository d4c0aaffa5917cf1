"""Signatures, names and marks of wrapped callables, and a decorator that does nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import inspect

F = TypeVar("F", bound="Callable[..., Any]")

_COROUTINE = 0x80  # inspect.CO_COROUTINE, which is not worth importing inspect for


def create_updated_function_signature(
    original_function: Callable[..., Any], **extended_kwargs: Any
) -> inspect.Signature:
    """Return the signature of a function with further keyword-only parameters.

    Assign it to ``__signature__`` of a wrapper with these arguments. ``help()``, editors and
    ``inspect`` then show them.

    Args:
        original_function: Its parameters and its return annotation are kept. ``self`` of a bound
            method is left out.
        **extended_kwargs: Name and default of each new parameter, in this order. The annotation is
            the type of the default. With a default of None the parameter has no annotation. With
            ``inspect.Parameter.empty`` it is required and has no annotation.

    Returns:
        The new signature, with the new parameters before a ``**kwargs`` parameter.

    Raises:
        ValueError: A name is already a parameter of the function, or the function's
            signature can't be determined.

    Example:
        >>> def scale(x, factor=1, **options): ...
        >>> print(create_updated_function_signature(scale, verbose=True, log=None))
        (x, factor=1, *, verbose: bool = True, log=None, **options)
    """
    import inspect

    try:
        signature = signature_of(original_function)
    except ValueError as error:
        raise ValueError(f"{original_function!r} has no signature that can be extended") from error
    taken = [name for name in extended_kwargs if name in signature.parameters]
    if taken:
        raise ValueError(
            f"{original_function!r} already has the parameter {', '.join(taken)}. "
            "Choose other names for the new parameters"
        )
    empty = inspect.Parameter.empty
    # A default of None gives no hint of the type.
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=empty if default is None or default is empty else type(default),
        )
        for name, default in extended_kwargs.items()
    ]
    parameters = [*signature.parameters.values(), *added]
    return signature.replace(parameters=sorted(parameters, key=lambda one: one.kind))


def accepts_parameter(func: Callable[..., Any], name: str) -> bool:
    """Return whether a call may pass ``name``, by keyword or, if positional-only, by position.

    Args:
        func: A callable with a signature.
        name: The name of a parameter. The names of ``*args`` and ``**kwargs`` don't count.

    Returns:
        True if ``func`` has that parameter or ``**kwargs``.

    Raises:
        ValueError: The signature of ``func`` can't be determined.

    Example:
        >>> def step(x, *, scale=1.0): ...
        >>> accepts_parameter(step, "scale"), accepts_parameter(step, "offset")
        (True, False)
    """
    import inspect

    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD
        or (p.name == name and p.kind is not inspect.Parameter.VAR_POSITIONAL)
        for p in signature_of(func).parameters.values()
    )


def positional_names(func: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a call may pass by position, in order."""
    import inspect

    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature_of(func).parameters.values() if p.kind in by_position]


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """Return ``inspect.signature``, also if annotations use names only type checkers import."""
    import inspect

    if sys.version_info >= (3, 14):
        from annotationlib import Format

        # Annotations are evaluated by this call, which would raise NameError for such names.

        return inspect.signature(target, annotation_format=Format.FORWARDREF)
    return inspect.signature(target)


def through_descriptor(target: Any, decorate: Callable[[Any], Any]) -> Any:
    """Decorate a callable, or the callables inside a staticmethod, classmethod or property."""
    if isinstance(target, (staticmethod, classmethod)):
        inner = through_descriptor(target.__func__, decorate)
        descriptor = type(target)(inner)
        # The constructor copies only the usual attributes of the function, and none of the target.
        for attributes in (vars(target), getattr(inner, "__dict__", {})):
            vars(descriptor).update((n, v) for n, v in attributes.items() if n != "__wrapped__")
        return descriptor
    if isinstance(target, property):
        fget, fset, fdel = (
            None if accessor is None else decorate(accessor)
            for accessor in (target.fget, target.fset, target.fdel)
        )
        return type(target)(fget, fset, fdel, target.__doc__)
    if not callable(target):
        raise TypeError(
            f"{target!r} can't be decorated: a function, method, class, staticmethod, classmethod "
            "or property was expected"
        )
    return decorate(target)


def inner_callables(target: Any) -> Iterator[Any]:
    """Yield the callables that hold the attributes of ``target``: in a descriptor, or itself."""
    if isinstance(target, property):
        accessors = (target.fget, target.fset, target.fdel)
        yield from (accessor for accessor in accessors if accessor is not None)
    elif isinstance(target, (staticmethod, classmethod)):
        yield target.__func__
    else:
        yield target


def mark_if_coroutine_function(wrapper: Any, wrapped: Any) -> None:
    """Let ``asyncio.iscoroutinefunction`` return True for a wrapper of a coroutine function.

    A mark of ``wrapped`` itself is copied by ``functools.wraps``.
    """
    while isinstance(wrapped, partial):
        wrapped = wrapped.func
    code = getattr(getattr(wrapped, "__func__", wrapped), "__code__", None)
    if not isinstance(code, CodeType) or not code.co_flags & _COROUTINE:
        return
    if sys.version_info >= (3, 12):
        import inspect

        inspect.markcoroutinefunction(wrapper)
    else:
        import asyncio.coroutines

        # asyncio.iscoroutinefunction of Python 3.10 and 3.11 looks for this marker.
        wrapper._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


def display_name(target: Any) -> str:
    """Return the name for messages: qualified inside a class, else the plain name."""
    while isinstance(target, partial):
        target = target.func
    name: str | None = getattr(target, "__name__", None)
    if name is None:
        return type(target).__name__
    qualified: str = getattr(target, "__qualname__", name)
    owner = qualified.rpartition(".")[0]
    return qualified if owner and not owner.endswith("<locals>") else name


def full_name(target: Any) -> str:
    """Return module and qualified name, as far as the object has them."""
    name = getattr(target, "__qualname__", None) or display_name(target)
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module else name


class NullDecorator:
    """A decorator that returns the decorated object, and a context manager that does nothing."""

    __slots__ = ()

    def __call__(self, func: F) -> F:
        """Return ``func`` itself."""
        return func

    def __enter__(self) -> NullDecorator:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let an exception pass."""


@overload
def null_decorator(func: F, /) -> F: ...
@overload
def null_decorator(*args: Any, **kwargs: Any) -> NullDecorator: ...
def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """Stand in for an optional decorator, with or without arguments, or for a context manager.

    It replaces ``triton.jit``, ``triton.autotune(configs=...)`` or ``nvtx.annotate("x")`` if the
    library is missing.

    Args:
        *args: Either the decorated function or class alone, or the arguments of the real decorator.
        **kwargs: Keyword arguments of the real decorator.

    Returns:
        The single positional argument itself, if it is callable and the only argument. Otherwise
        a decorator that returns the decorated object and also works in a ``with`` statement.

    Example:
        >>> @null_decorator
        ... def increment(x):
        ...     return x + 1
        >>> increment(1)
        2
        >>> @null_decorator(configs=[1], key=["n"])
        ... def double(x):
        ...     return 2 * x
        >>> with null_decorator("range"):
        ...     double(4)
        8
    """
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return NullDecorator()
