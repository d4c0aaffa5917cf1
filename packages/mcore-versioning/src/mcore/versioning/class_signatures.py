"""The signature of a class whose metaclass intercepts calls."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any


def class_signature(cls: type[Any], *, without: type[type]) -> inspect.Signature:
    """What `inspect.signature(cls)` would say if a metaclass had no `__call__`.

    Args:
        cls: The class.
        without: The metaclass to look past, together with its subclasses that add no `__call__`.

    Returns:
        `__signature__` of the class or of a base; else the signature of a `__call__` in another
        metaclass; else that of `__new__` or `__init__`, whichever comes first in the order of the
        bases, `__new__` within one class.

    Raises:
        AttributeError: There is none to be found, as for some classes written in C.
    """
    try:
        return _explicit_signature(cls) or _metaclass_signature(cls, without) or _constructor(cls)
    except ValueError as error:
        raise AttributeError(f"{cls.__name__} has no signature") from error


def _explicit_signature(cls: type[Any]) -> Any:
    return next((s for base in cls.__mro__ if (s := vars(base).get("__signature__"))), None)


def _metaclass_signature(cls: type[Any], without: type[type]) -> inspect.Signature | None:
    for meta in type(cls).__mro__:
        call = vars(meta).get("__call__")
        if isinstance(call, FunctionType) and meta is not without:
            return inspect.signature(MethodType(call, cls))
    return None


def _constructor(cls: type[Any]) -> inspect.Signature:
    places = ((base, name) for base in cls.__mro__ for name in ("__new__", "__init__"))
    base, name = next((base, name) for base, name in places if name in vars(base))
    method = vars(base)[name]
    method = getattr(method, "__func__", method)
    if isinstance(method, FunctionType):
        return inspect.signature(MethodType(method, cls))
    # Written in C: ask about a class that has nothing else.
    return inspect.signature(type(cls.__name__, (base,), {}))
