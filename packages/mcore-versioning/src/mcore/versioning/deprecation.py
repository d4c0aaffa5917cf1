"""Warnings about deprecated functions, classes and arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import wraps
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar

from mcore.versioning.signatures import (
    accepts_parameter,
    display_name,
    mark_if_coroutine_function,
    positional_names,
    signature_of,
    through_descriptor,
)

Context = TypeVar("Context")
Params = TypeVar("Params")
F = TypeVar("F", bound="Callable[..., Any]")

NOTICE_ATTRIBUTE = "_deprecation_notice"
_MACHINERY_MODULES = ("abc", "typing")


class Notice(NamedTuple):
    """The contents of a warning. Category None disables it, ``stacklevel`` 1 blames the caller."""

    message: str
    category: type[Warning] | None
    stacklevel: int


class DeprecationInfo(NamedTuple):
    """The arguments of ``deprecated`` for an object, as a named tuple.

    Attributes:
        version: The version in which the deprecation began.
        removal_version: The version that removes the object, if known.
        alternative: The replacement, if any.
        reason: Why the object is deprecated, if given.
        message: The text of the warning.

    Example:
        >>> DeprecationInfo("1.0.0", "2.0.0", None, None, "f is deprecated").removal_version
        '2.0.0'
    """

    version: str
    removal_version: str | None
    alternative: str | None
    reason: str | None
    message: str


def deprecate_args(
    *names: str,
    message: str = "Argument '{name}' has been deprecated and should not be used.",
) -> Callable[[F], F]:
    """Refuse calls that pass one of the named arguments, by keyword or by position.

    A class stays the same object. Such arguments are refused when an instance of it or of a
    subclass is made.

    Args:
        *names: Parameters of the decorated function or of the class's constructor, or any names if
            it has ``**kwargs``.
        message: The text of the error, with ``{name}`` in place of the argument's name.

    Returns:
        A decorator that keeps the signature.

    Raises:
        TypeError: At a call: an argument of that name is given. Of several, the first in ``names``
            is reported. At decoration: ``names`` holds something other than names.
        ValueError: At decoration: no names, or a name that the function does not accept.

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
        raise TypeError(f"the arguments of @deprecate_args must be names in quotes, not {names!r}")
    if not names:
        raise ValueError('@deprecate_args needs the names of the arguments, as in ("eps",)')
    texts = {name: message.format(name=name) for name in names}

    def refuse_arguments(target: Any) -> Any:
        if isinstance(target, type):
            _refuse_at_construction(target, texts)
            return target
        return _wrap_refusing(target, target, texts, display_name(target))

    return lambda target: through_descriptor(target, refuse_arguments)


def _wrap_refusing(
    func: Callable[..., Any],
    documented: Callable[..., Any],
    texts: Mapping[str, str],
    shown_name: str,
) -> Callable[..., Any]:
    """Wrap ``func``, which has the signature of ``documented``."""
    unknown = [name for name in texts if not accepts_parameter(documented, name)]
    if unknown:
        raise ValueError(
            f"{shown_name} has no parameter {', '.join(unknown)} and no **kwargs. "
            "Name parameters that a call could pass"
        )
    order = positional_names(documented)
    # A name that only ``**kwargs`` accepts has no position.
    positions = {name: order.index(name) for name in texts if name in order}
    inner = blaming_one_further(func)

    @wraps(documented)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        for name, text in texts.items():
            if name in kwargs or positions.get(name, len(args)) < len(args):
                raise TypeError(text)
        return inner(*args, **kwargs)

    mark_if_coroutine_function(refusing, func)
    return refusing


def _accept_nothing(self: object) -> None: ...


def _refuse_at_construction(cls: type[Any], texts: Mapping[str, str]) -> None:
    """Wrap the first method that gets the arguments of the constructor, in place."""
    is_made_in_new = isinstance(cls.__new__, FunctionType)
    name = "__new__" if is_made_in_new else "__init__"
    documented: Any = getattr(cls, name)
    if documented is object.__init__:  # its signature seems to accept any argument
        documented = _accept_nothing
    own = vars(cls).get(name)

    def inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_made_in_new:
            return super(cls, self).__new__(self, *args, **kwargs)
        return _call_inherited_init(cls, self, args, kwargs)

    wrapped = _wrap_refusing(
        inherited if own is None else documented, documented, texts, cls.__name__
    )
    type.__setattr__(cls, name, staticmethod(wrapped) if is_made_in_new else wrapped)


def deprecate_inference_params(
    inference_context: Context | None, inference_params: Params | None
) -> Context | Params | None:
    """Choose between an argument and its deprecated former name, and warn about the former name.

    Only None means "not given": an empty list and 0 count as given.

    Args:
        inference_context: The value of the argument under its current name.
        inference_params: The value of the argument under its deprecated name.

    Returns:
        ``inference_context``, or ``inference_params`` if ``inference_context`` is None.

    Warns:
        UserWarning: ``inference_params`` was given. It blames the line that calls this function.

    Example:
        >>> deprecate_inference_params("context", None)
        'context'
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     deprecate_inference_params(None, "params")
        'params'
        >>> print(caught[0].message)
        `inference_params` is deprecated. Pass `inference_context` alone.
    """
    if inference_params is None:
        return inference_context
    is_ignored = inference_context is not None
    cause = " and ignored, since `inference_context` is given too" if is_ignored else ""
    warnings.warn(
        f"`inference_params` is deprecated{cause}. Pass `inference_context` alone.",
        UserWarning,
        stacklevel=2,
    )
    return inference_context if is_ignored else inference_params


def warn_on_call(func: Callable[..., Any], notice: Notice) -> Callable[..., Any]:
    """Wrap ``func``, even a coroutine function, in a plain function that warns at each call.

    An existing wrapper of this kind is replaced, so a call warns once.
    """
    warned: Callable[..., Any] = func.__wrapped__ if _is_warning_wrapper(func) else func  # type: ignore[attr-defined]
    wrapper = wraps(func)(_make_warning_wrapper(warned, notice))
    wrapper.__wrapped__ = warned
    if not hasattr(func, "__name__"):
        wrapper.__name__ = wrapper.__qualname__ = display_name(func)
    setattr(wrapper, NOTICE_ATTRIBUTE, notice)
    mark_if_coroutine_function(wrapper, warned)
    return wrapper


def without_warning(func: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap a wrapper of :func:`warn_on_call` and keep its attributes. Return others as is."""
    if not _is_warning_wrapper(func):
        return func
    bare: Callable[..., Any] = func.__wrapped__  # type: ignore[attr-defined]
    for name, value in vars(func).items():
        if name != "__wrapped__":
            setattr(bare, name, value)
    return bare


def blaming_one_further(func: Callable[..., Any]) -> Callable[..., Any]:
    """Prepare ``func`` for a further wrapper of this package between it and its callers."""
    if not _is_warning_wrapper(func):
        return func
    notice: Notice = getattr(func, NOTICE_ATTRIBUTE)
    return warn_on_call(func, notice._replace(stacklevel=notice.stacklevel + 1))


def _make_warning_wrapper(warned: Callable[..., Any], notice: Notice) -> Callable[..., Any]:
    message, category, stacklevel = notice.message, notice.category, notice.stacklevel + 1

    def warning_wrapper(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(message, category, stacklevel)
        return warned(*args, **kwargs)

    return warning_wrapper


# Wrappers are recognised by their code, since other decorators copy attributes to their own.
_WRAPPER_CODE = getattr(_make_warning_wrapper(repr, Notice("", None, 1)), "__code__")  # noqa: B009


def _is_warning_wrapper(func: Any) -> bool:
    return getattr(func, "__code__", None) is _WRAPPER_CODE


def warn_on_use(cls: type[Any], notice: Notice) -> None:
    """Make a class warn, in place, when it is instantiated or subclassed directly.

    The hooks do nothing for subclasses, nor after the class was deprecated with another notice.
    """

    def hook_instantiation(call_own: Callable[..., Any]) -> Callable[..., Any]:
        def initialise(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            used = type(self)
            if vars(used).get(NOTICE_ATTRIBUTE) is notice:
                # A metaclass other than type may have a __call__ between this hook and the user.
                _warn_user(notice, () if type(used) is type else _find_code(type(used), "__call__"))
            return call_own(self, *args, **kwargs)

        return initialise

    def hook_subclassing(call_own: Callable[..., Any]) -> Callable[..., Any]:
        def initialise_subclass(subclass: type[Any], /, **options: Any) -> None:
            if any(vars(base).get(NOTICE_ATTRIBUTE) is notice for base in subclass.__bases__):
                makers = (
                    *_find_code(type(subclass), "__new__"),
                    *_find_code(subclass, "__init_subclass__"),
                )
                _warn_user(notice, makers)
            call_own(subclass, **options)

        return initialise_subclass

    wrap_init(cls, hook_instantiation)  # not __new__, which also runs when an instance is unpickled
    wrap_init_subclass(cls, hook_subclassing)


def wrap_init(cls: type[Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the ``__init__`` of a class, defined or inherited. The signature stays."""
    own = vars(cls).get("__init__")
    signature = None
    if isinstance(own, FunctionType):
        call_own: Callable[..., Any] = own
    elif own is None:
        # Read before the hook is set: `inspect` would then report the hook's arguments.
        with suppress(ValueError, TypeError):  # the base may be written in C, without a signature
            signature = signature_of(cls)

        def call_own(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return _call_inherited_init(cls, self, args, kwargs)
    else:

        def call_own(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return own.__get__(self, type(self))(*args, **kwargs)

    hook: Any = wraps(own or cls.__init__)(wrap(call_own))
    if signature is not None:
        import inspect

        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [receiver, *signature.parameters.values()]
        hook.__signature__ = signature.replace(parameters=parameters)
    type.__setattr__(cls, "__init__", hook)


def wrap_init_subclass(
    cls: type[Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap the ``__init_subclass__`` of a class, defined or inherited."""
    own = vars(cls).get("__init_subclass__")

    def call_own(subclass: type[Any], /, **options: Any) -> None:
        if own is None:
            super(cls, subclass).__init_subclass__(**options)
        else:
            own.__get__(None, subclass)(**options)

    hook = wraps(getattr(own, "__func__", cls.__init_subclass__))(wrap(call_own))
    type.__setattr__(cls, "__init_subclass__", classmethod(hook))


def _call_inherited_init(
    cls: type[Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Initialise an instance as if ``cls`` did not define ``__init__``."""
    inherited = super(cls, instance).__init__
    if getattr(inherited, "__objclass__", None) is not object:
        return inherited(*args, **kwargs)
    # object.__init__ refuses arguments of __new__ as soon as the class has an __init__.
    own_constructor: object = type(instance).__new__
    if (args or kwargs) and own_constructor is object.__new__:
        hint = ". Put @deprecated above @dataclass" if "__dataclass_fields__" in vars(cls) else ""
        raise TypeError(f"{type(instance).__name__}() takes no arguments{hint}")
    return None


def _warn_user(notice: Notice, machinery: Collection[CodeType]) -> None:
    """Warn, and blame the nearest frame that is not part of making a class or an instance."""
    # Two frames up: this function and its hook. The hook's caller may be `type.__call__`, which has
    # no frame, or Python code of a metaclass, which has.
    frame: FrameType | None = sys._getframe(2)
    stacklevel = 2 + notice.stacklevel
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        is_library = module in _MACHINERY_MODULES or module.startswith("mcore.versioning.")
        if not is_library and frame.f_code not in machinery:
            break
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(notice.message, notice.category, stacklevel)


def _find_code(cls: type[Any], name: str) -> Collection[CodeType]:
    """Return the code of a method and of the methods that it may call with super()."""
    methods = (vars(owner).get(name) for owner in cls.__mro__)
    functions = (getattr(method, "__func__", method) for method in methods)
    return [function.__code__ for function in functions if isinstance(function, FunctionType)]
