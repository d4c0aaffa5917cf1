"""Wrappers that warn about a deprecated callable when it is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from mcore.versioning.wrapping import display_name, mark_if_coroutine_function


class Notice(NamedTuple):
    """What to warn with.

    Attributes:
        message: The text.
        category: The class of the warning; None means not to warn at all.
        stacklevel: 1 blames the caller of the deprecated object, 2 that one's caller.
    """

    message: str
    category: type[Warning] | None
    stacklevel: int


NOTICE_ATTRIBUTE = "_deprecation_notice"


def warn_on_call(func: Callable[..., Any], notice: Notice) -> Callable[..., Any]:
    """A wrapper that warns at each call, before it calls `func`.

    A wrapper made by this function is replaced rather than wrapped again, so that a call warns
    once. Coroutine and generator functions warn when called, at the line of the call; the wrapper
    is a plain function.

    Args:
        func: Any callable.
        notice: What to warn with.
    """
    warned: Callable[..., Any] = func.__wrapped__ if _warns(func) else func  # type: ignore[attr-defined]
    wrapper = wraps(func)(_warning_wrapper(warned, notice))
    wrapper.__wrapped__ = warned
    if not hasattr(func, "__name__"):
        wrapper.__name__ = wrapper.__qualname__ = display_name(func)
    setattr(wrapper, NOTICE_ATTRIBUTE, notice)
    mark_if_coroutine_function(wrapper, warned)
    return wrapper


def without_warning(func: Callable[..., Any]) -> Callable[..., Any]:
    """What a wrapper of `warn_on_call` wraps, with the wrapper's attributes; else `func` itself."""
    if not _warns(func):
        return func
    bare: Callable[..., Any] = func.__wrapped__  # type: ignore[attr-defined]
    for name, value in vars(func).items():
        if name != "__wrapped__":
            setattr(bare, name, value)
    return bare


def blaming_one_further(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`, prepared for a wrapper of this package that stands between it and its callers."""
    if not _warns(func):
        return func
    notice: Notice = getattr(func, NOTICE_ATTRIBUTE)
    return warn_on_call(func, notice._replace(stacklevel=notice.stacklevel + 1))


def _warning_wrapper(warned: Callable[..., Any], notice: Notice) -> Callable[..., Any]:
    message, category, stacklevel = notice.message, notice.category, notice.stacklevel + 1

    def warning_wrapper(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(message, category, stacklevel)
        return warned(*args, **kwargs)

    return warning_wrapper


# Wrappers are recognised by their code, since other decorators copy attributes to their own.
_WRAPPER_CODE = getattr(_warning_wrapper(repr, Notice("", None, 1)), "__code__")  # noqa: B009


def _warns(func: Any) -> bool:
    return getattr(func, "__code__", None) is _WRAPPER_CODE
