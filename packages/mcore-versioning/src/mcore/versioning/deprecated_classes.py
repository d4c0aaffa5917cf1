"""Hooks in a deprecated class that warn about direct instances and direct subclasses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from functools import wraps
from types import CodeType, FrameType, FunctionType
from typing import Any

from mcore.versioning.deprecated_functions import NOTICE_ATTRIBUTE, Notice

_MACHINERY_MODULES = ("abc", "typing")


def warn_on_use(cls: type[Any], notice: Notice) -> None:
    """Make a class warn, in place, when it is instantiated or subclassed directly.

    The hooks compare `notice` with the one in the class itself: they stay silent for subclasses,
    and for this class once it has been deprecated anew. `__init__` carries the first hook, since
    `__new__` also runs when an instance is unpickled or copied.

    Args:
        cls: The class, whose own attribute `_deprecation_notice` is `notice`.
        notice: What to warn with.
    """
    _hook_into_instantiation(cls, notice)
    _hook_into_subclassing(cls, notice)


def _hook_into_instantiation(cls: type[Any], notice: Notice) -> None:
    own = vars(cls).get("__init__")
    signature = _signature_with_self(cls) if own is None else None
    call_own = own if isinstance(own, FunctionType) else None

    def initialise(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        used = type(self)
        if vars(used).get(NOTICE_ATTRIBUTE) is notice:
            # A metaclass other than type may have a __call__ that stands between us and the user.
            _warn_user(notice, () if type(used) is type else _code(type(used), "__call__"))
        if call_own is not None:
            return call_own(self, *args, **kwargs)
        if own is None:
            return _initialise_as_inherited(cls, self, args, kwargs)
        return own.__get__(self, used)(*args, **kwargs)

    hook: Any = wraps(own or cls.__init__)(initialise)
    if signature is not None:
        hook.__signature__ = signature
    type.__setattr__(cls, "__init__", hook)


def _hook_into_subclassing(cls: type[Any], notice: Notice) -> None:
    own = vars(cls).get("__init_subclass__")

    def notice_subclass(subclass: type[Any], /, **kwargs: Any) -> None:
        if any(vars(base).get(NOTICE_ATTRIBUTE) is notice for base in subclass.__bases__):
            makers = (*_code(type(subclass), "__new__"), *_code(subclass, "__init_subclass__"))
            _warn_user(notice, makers)
        if own is None:
            super(cls, subclass).__init_subclass__(**kwargs)
        else:
            own.__get__(None, subclass)(**kwargs)

    hook = wraps(getattr(own, "__func__", cls.__init_subclass__))(notice_subclass)
    type.__setattr__(cls, "__init_subclass__", classmethod(hook))


def _initialise_as_inherited(
    cls: type[Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what would happen if `cls` had no `__init__` of its own."""
    inherited = super(cls, instance).__init__
    if getattr(inherited, "__objclass__", None) is not object:
        return inherited(*args, **kwargs)
    # object.__init__ refuses arguments that belong to __new__, now that there is an __init__.
    own_constructor: object = type(instance).__new__
    if (args or kwargs) and own_constructor is object.__new__:
        hint = "; put @deprecated above @dataclass" if "__dataclass_fields__" in vars(cls) else ""
        raise TypeError(f"{type(instance).__name__}() takes no arguments{hint}")
    return None


def _signature_with_self(cls: type[Any]) -> Any:
    """The signature of the class as that of an `__init__`; None where it has none."""
    import inspect

    try:
        signature = inspect.signature(cls)
    except (ValueError, TypeError):
        return None
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[receiver, *signature.parameters.values()])


def _warn_user(notice: Notice, machinery: Collection[CodeType]) -> None:
    """Warn, and blame the nearest frame that is not part of making a class or an instance."""
    frame: FrameType | None = sys._getframe(2)
    stacklevel = 2 + notice.stacklevel
    while frame is not None and _is_machinery(frame, machinery):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(notice.message, notice.category, stacklevel)


def _is_machinery(frame: FrameType, machinery: Collection[CodeType]) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    return (
        module in _MACHINERY_MODULES
        or module.startswith("mcore.versioning.")
        or frame.f_code in machinery
    )


def _code(cls: type[Any], name: str) -> Collection[CodeType]:
    """The code of a method, and of the methods that it may call with super()."""
    methods = (vars(owner).get(name) for owner in cls.__mro__)
    functions = (getattr(method, "__func__", method) for method in methods)
    return [function.__code__ for function in functions if isinstance(function, FunctionType)]
