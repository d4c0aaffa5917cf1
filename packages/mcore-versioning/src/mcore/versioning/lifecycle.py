"""Stages in the life of an API: internal, experimental, deprecated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from packaging.version import Version

from mcore.versioning.deprecation import (
    NOTICE_ATTRIBUTE,
    DeprecationInfo,
    Notice,
    warn_on_call,
    warn_on_use,
    without_warning,
)
from mcore.versioning.signatures import display_name, inner_callables, through_descriptor

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any] | type[Any]")

# The attributes with the arguments of `deprecated`, in the order of DeprecationInfo.
_DETAILS = ("_deprecated_version", "_removal_version", "_alternative", "_deprecation_reason")


def deprecated(
    version: str,
    removal_version: str | None = None,
    alternative: str | None = None,
    reason: str | None = None,
    *,
    category: type[Warning] | None = DeprecationWarning,
    stacklevel: int = 1,
) -> Callable[[F], F]:
    """Deprecate a function, method, property or class.

    A function, also one that returns a coroutine or a generator, warns at each call and blames the
    line of the call. A class stays the same object. It warns when it is instantiated or subclassed
    directly, not when a subclass is instantiated, nor when an instance is copied or unpickled
    through ``__new__`` (exceptions are unpickled by a call, which warns). Deprecating an object
    twice replaces the first deprecation.

    Put it above or below ``staticmethod`` and ``classmethod``, below ``property`` (type checkers
    accept no decorator above it), above ``dataclasses.dataclass``, and above
    ``typing_extensions.deprecated(..., category=None)`` with the same text, which is for type
    checkers.

    The result has the attributes ``_deprecated``, ``_deprecated_version``, ``_removal_version``,
    ``_alternative``, ``_deprecation_reason`` and ``__deprecated__``. :func:`get_deprecation` reads
    them.

    Args:
        version: The version in which the deprecation begins.
        removal_version: The version that removes the object, later than ``version``.
        alternative: The replacement.
        reason: The reason.
        category: The class of the warning. None attaches the attributes and never warns.
        stacklevel: 1 blames the caller, 2 the caller's caller.

    Returns:
        A decorator that keeps the type of the decorated object.

    Raises:
        packaging.version.InvalidVersion: ``version`` or ``removal_version`` is not valid.
        ValueError: ``removal_version`` is not later than ``version``, ``stacklevel`` is below 1, or
            the decorator for type checkers below it has another text.
        TypeError: Used without arguments, on something that can't be deprecated, or with a
            ``category`` that is not a warning class.

    Example:
        >>> @deprecated("1.0.0", removal_version="2.0.0", alternative="new", reason="Faster.")
        ... def old():
        ...     return 1
        >>> print(old.__deprecated__)
        old is deprecated since version 1.0.0. Use new instead. Will be removed in version 2.0.0. \
Reason: Faster.
    """
    for name, value in (("version", version), ("removal_version", removal_version)):
        if not isinstance(value, str) and (name == "version" or value is not None):
            raise TypeError(
                f"{name} of @deprecated is {value!r}. Write the version in quotes, "
                'as in @deprecated("1.0.0")'
            )
    begin = Version(version)
    if removal_version is not None and Version(removal_version) <= begin:
        raise ValueError(
            f"removal_version {removal_version} must be later than version {version}, "
            "in which the deprecation begins"
        )
    is_warning: bool = isinstance(category, type) and issubclass(category, Warning)
    if category is not None and not is_warning:
        raise TypeError(f"category must be a subclass of Warning or None, not {category!r}")
    if stacklevel < 1:
        raise ValueError(
            f"stacklevel is {stacklevel}. Pass 1 to blame the caller, 2 for the caller's caller"
        )
    given = (version, removal_version, alternative, reason)
    details = {"_deprecated": True, **dict(zip(_DETAILS, given, strict=True))}

    def deprecate(target: Any) -> Any:
        parts = (
            ("{} is deprecated since version {}.", (display_name(target), version)),
            ("Use {} instead.", (alternative,)),
            ("Will be removed in version {}.", (removal_version,)),
            ("Reason: {}", (reason,)),
        )
        message = " ".join(text.format(*given) for text, given in parts if None not in given)
        _check_standard_text(target, message)
        notice = Notice(message, category, stacklevel)
        is_class = isinstance(target, type)
        if not is_class:
            target = without_warning(target) if category is None else warn_on_call(target, notice)
        # A class is hooked after the notice is set: a hook warns only if it finds its own notice.
        _attach(target, {**details, "__deprecated__": message, NOTICE_ATTRIBUTE: notice})
        if is_class and category is not None:
            warn_on_use(target, notice)
        return target

    return lambda target: through_descriptor(target, deprecate)


def internal_api(func: T) -> T:
    """Mark a function or class as internal: not for users, and exempt from compatibility checks.

    Args:
        func: A function or class. In a staticmethod, classmethod or property the functions inside
            are marked.

    Returns:
        The same object, with the attribute ``_internal_api = True``.

    Raises:
        TypeError: The object does not accept attributes.

    Example:
        >>> @internal_api
        ... def helper(): ...
        >>> is_internal_api(helper)
        True
    """
    return _mark(func, "_internal_api")


def experimental_api(func: T) -> T:
    """Mark a function or class as experimental, hence exempt from compatibility checks.

    Unlike ``experimental_fn`` and ``experimental_cls`` this changes nothing about its use.

    Args:
        func: A function or class. In a staticmethod, classmethod or property the functions inside
            are marked.

    Returns:
        The same object, with the attribute ``_experimental_api = True``.

    Raises:
        TypeError: The object does not accept attributes.

    Example:
        >>> @experimental_api
        ... class Draft: ...
        >>> is_experimental_api(Draft)
        True
    """
    return _mark(func, "_experimental_api")


def is_internal_api(obj: object) -> bool:
    """Return whether the object itself is marked internal. A subclass of a marked class is not.

    Example:
        >>> is_internal_api(print)
        False
    """
    return any(own.get("_internal_api") for own in _own_attributes(obj))


def is_experimental_api(obj: object) -> bool:
    """Return whether the object itself is marked experimental. A subclass of a marked class is not.

    Example:
        >>> is_experimental_api(print)
        False
    """
    return any(own.get("_experimental_api") for own in _own_attributes(obj))


def get_deprecation(obj: object) -> DeprecationInfo | None:
    """Return the arguments of :func:`deprecated` for an object itself, None if not deprecated.

    For a property with several deprecated accessors, those of the getter.

    Example:
        >>> @deprecated("1.0.0", reason="Unused.")
        ... class Old: ...
        >>> get_deprecation(Old).reason
        'Unused.'
        >>> get_deprecation(print) is None
        True
    """
    for attributes in _own_attributes(obj):
        if NOTICE_ATTRIBUTE in attributes:
            details = (attributes[name] for name in _DETAILS)
            return DeprecationInfo._make((*details, attributes[NOTICE_ATTRIBUTE].message))
    return None


def _check_standard_text(target: Any, message: str) -> None:
    """Refuse an object if the standard decorator (PEP 702) below has another text."""
    (own,) = _own_attributes(target) if callable(target) else ({},)
    text = own.get("__deprecated__")
    # A text that an earlier use of this decorator set is replaced. It does not count.
    notice = own.get(NOTICE_ATTRIBUTE)
    if text not in (None, message) and (notice is None or notice.message != text):
        raise ValueError(
            f"the standard deprecated decorator below @deprecated has the text {text!r}, which "
            f"type checkers would print instead of {message!r}. Use the latter text for both"
        )


def _mark(obj: T, attribute: str) -> T:
    for part in inner_callables(obj):
        _attach(part, {attribute: True})
    return obj


def _attach(obj: Any, attributes: Mapping[str, Any]) -> None:
    try:
        for name, value in attributes.items():
            setattr(obj, name, value)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{obj!r} accepts no attributes. Decorate a function or class written in Python"
        ) from error


def _own_attributes(obj: object) -> Iterator[Mapping[str, Any]]:
    """Yield the attributes of the object or, for a method or descriptor, the functions inside."""
    for part in inner_callables(obj):
        yield getattr(part, "__dict__", {})
