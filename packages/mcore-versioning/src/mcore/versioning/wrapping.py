"""What decorators need to know about the callables that they wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


def through_descriptor(target: Any, decorate: Callable[[Any], Any]) -> Any:
    """Decorate a callable, or the callables inside a staticmethod, classmethod or property.

    Args:
        target: What stands below the decorator.
        decorate: Takes and returns a plain callable.

    Returns:
        The decorated callable, or a new descriptor of the same type around it.

    Raises:
        TypeError: `target` is neither callable nor one of these descriptors.
    """
    if isinstance(target, (staticmethod, classmethod)):
        inner = through_descriptor(target.__func__, decorate)
        descriptor = type(target)(inner)
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
    """The callables that carry the attributes of `target`: those in a descriptor, or itself."""
    if isinstance(target, property):
        accessors = (target.fget, target.fset, target.fdel)
        yield from (accessor for accessor in accessors if accessor is not None)
    elif isinstance(target, (staticmethod, classmethod)):
        yield target.__func__
    else:
        yield target


def mark_if_coroutine_function(wrapper: Any, wrapped: Any) -> None:
    """Let `asyncio.iscoroutinefunction` see a coroutine function in the wrapper of one.

    The wrappers here are plain functions, so that they act when called and not when awaited.
    """
    import inspect

    if not inspect.iscoroutinefunction(wrapped):
        return
    mark = getattr(inspect, "markcoroutinefunction", _mark_for_asyncio)
    mark(wrapper)


def display_name(target: Any) -> str:
    """The name for messages: qualified for what is nested in a class, else the plain name.

    Example:
        >>> display_name(display_name), display_name(partial(print, "x"))
        ('display_name', 'print')
    """
    while isinstance(target, partial):
        target = target.func
    name: str | None = getattr(target, "__name__", None)
    if name is None:
        return type(target).__name__
    qualified: str = getattr(target, "__qualname__", name)
    owner = qualified.rpartition(".")[0]
    return qualified if owner and not owner.endswith("<locals>") else name


def full_name(target: Any) -> str:
    """Module and qualified name, as far as the object has them."""
    name = getattr(target, "__qualname__", None) or display_name(target)
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module else name


def _mark_for_asyncio(wrapper: Any) -> None:
    """Python 3.10 and 3.11 have only this marker."""
    import asyncio.coroutines

    wrapper._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
