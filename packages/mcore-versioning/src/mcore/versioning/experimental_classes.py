"""Classes that can be used only while experimental code is enabled.

The gate is in the metaclass. A class that has a metaclass gets another metaclass. A class without
one is replaced by a subclass with the same contents, since Python does not allow replacing
``type``.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType, MethodType, new_class
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mcore.versioning import config
from mcore.versioning.class_readers import may_construct, may_read
from mcore.versioning.config import is_experimental_enabled
from mcore.versioning.experimental import (
    DEFAULT_LIFETIME,
    Gate,
    check_introduction,
    check_lifetime,
    warn_if_expired,
)
from mcore.versioning.signatures import full_name, signature_of

if TYPE_CHECKING:
    import inspect

C = TypeVar("C", bound="type[Any]")

# Slots of an instance, which the subclass that replaces a class inherits.
_NOT_COPIED = ("__dict__", "__weakref__")
_GATE = "_experimental_gate"
_PRESENTED_METACLASS = "_experimental_metaclass"
_PRESENTED_BASES = "_experimental_bases"

# By identity: reading an attribute of a gated class is slower than making an instance.
_classes_in_use: set[int] = set()
_defining_a_class: ContextVar[bool] = ContextVar("mcore_defining_a_class", default=False)


class ClassDecorator(Protocol):
    """A decorator that keeps the class's type and accepts another lifetime."""

    def __call__(self, cls: C, max_lifetime: int = DEFAULT_LIFETIME) -> C: ...


def experimental_cls(
    introduced_with_version: str,
    *,
    max_lifetime: int = DEFAULT_LIFETIME,
    current_version: str | None = None,
) -> ClassDecorator:
    """Gate a class: making an instance raises unless experimental code is enabled.

    So does making an instance of a subclass, and reading a public attribute that the decorated
    class defines, from the class or a subclass. Everything else works at any time: inherited and
    private attributes, defining subclasses, setting attributes, ``isinstance``, type hints and
    ``inspect.signature``. ``is_experimental``, on the class and on instances, is True while the
    gate is open.

    Objects made while the gate was open keep working: their methods may read attributes of the
    class and make further instances, they can be copied, and the backward pass of a
    ``torch.autograd.Function`` runs. Unpickling an exception is a call, though, and gated. Tools
    that describe a class (``inspect``, ``pydoc``, ``doctest``, ``unittest.mock``, sphinx) see its
    members at any time.

    The first use and the end of life are logged as for ``experimental_fn``.

    Put the decorator above all others that change the class, such as ``dataclasses.dataclass``.
    Methods must call their parents with ``super()``: ``super(Name, self)`` would find the subclass
    that replaces a class without a metaclass, and recurse forever.

    Args:
        introduced_with_version: The version of the class's distribution that introduced it.
        max_lifetime: Minor releases for which it may stay experimental. Also accepted as the
            second argument of the decorator.
        current_version: The current version, by default that of the distribution that owns the
            class's module. If that is unknown, nothing is checked.

    Returns:
        A decorator for classes. The result is the class itself if it has a metaclass other than
        ``type``, else a subclass with the same name and contents. It has the attributes
        ``_experimental_api`` and ``_introduced_with_version``.

    Raises:
        ExperimentalNotEnabledError: At use while experimental code is disabled.
        packaging.version.InvalidVersion: One of the versions is not valid.
        TypeError: Used without arguments, on an object that is not a class, or on a class that
            can't be gated: an enum, a ``TypedDict``, a protocol, or a class with a metaclass
            written in C. Also if ``max_lifetime`` is not an int.
        ValueError: ``max_lifetime`` is negative.

    Example:
        >>> @experimental_cls("0.1.0")
        ... class Cache:
        ...     def __init__(self, size):
        ...         self.size = size
        >>> Cache.is_experimental
        False
        >>> from mcore.versioning.config import experimental_enabled
        >>> with experimental_enabled():
        ...     Cache(8).size
        8
    """
    check_introduction("experimental_cls", introduced_with_version, max_lifetime, current_version)

    def validator(cls: Any, max_lifetime: int = max_lifetime) -> Any:
        check_lifetime(max_lifetime)
        _check_can_be_gated(cls)
        warn_if_expired(cls, introduced_with_version, max_lifetime, current_version)
        return _gate_class(cls, introduced_with_version)

    return validator


class GatedMeta(type):
    """The metaclass of gated classes and their subclasses.

    Always a parent of the metaclass, never the metaclass itself: ``torch.compile`` breaks the graph
    at a class if its metaclass defines ``__getattribute__`` in its body.
    """

    def __new__(
        meta, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> Any:
        """Make a class, with the gate open for the hooks that run during it."""
        if "__module__" not in namespace:  # made by a call, so Python would record this module
            module = sys._getframe(1).f_globals.get("__name__")
            namespace = {**namespace, "__module__": module}
        with _open_to_class_hooks():
            return super().__new__(meta, name, bases, namespace, **options)

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> None:
        """Complete a class, with the gate open for the hooks that run during it."""
        with _open_to_class_hooks():
            super().__init__(name, bases, namespace, **options)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance, if the gate is open."""
        if (
            config.ENABLE_EXPERIMENTAL is not True
            or id(cls) not in _classes_in_use
            or (config._may_be_overridden and config._override.get() is False)
        ):
            if is_experimental_enabled():
                _enter(cls)
            elif not may_construct(sys._getframe(1), _find_gated_parent(cls)):
                _get_gate(cls).refuse()
        return super().__call__(*args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        """Read an attribute. It is gated if it is public and a decorated class defines it."""
        if name.startswith("_"):
            present = _PRESENTED.get(name)
            return super().__getattribute__(name) if present is None else present(cls)
        is_open = is_experimental_enabled()
        if name == "is_experimental":
            return is_open
        is_in_use = id(cls) in _classes_in_use
        if (
            not (is_open and is_in_use)
            and not _defining_a_class.get()
            and _is_from_gated_class(cls, name)
        ):
            if is_open:
                _enter(cls)
            elif not may_read(sys._getframe(1), _find_gated_parent(cls), name, is_in_use):
                _get_gate(cls).refuse()
        return super().__getattribute__(name)


def _enter(cls: type[Any]) -> None:
    """Mark a class as in use: from now on only the flag decides whether instances can be made."""
    _get_gate(cls).announce()
    if id(cls) not in _classes_in_use:
        import weakref

        _classes_in_use.add(id(cls))
        weakref.finalize(cls, _classes_in_use.discard, id(cls)).atexit = False


def _get_gate(cls: type[Any]) -> Gate:
    gate: Gate = type.__getattribute__(cls, _GATE)
    return gate


def _find_gated_parent(cls: type[Any]) -> type[Any]:
    """Return the decorated class that a class is or inherits from."""
    return next(parent for parent in cls.__mro__ if _GATE in vars(parent))


def _gate_class(cls: type[Any], introduced: str) -> type[Any]:
    root: Any = type(cls)
    metaclass = _make_gated_metaclass(root)
    gated = _make_stand_in(cls, metaclass) if root is type else _set_metaclass(cls, metaclass)
    for name, value in {
        "_experimental_api": True,
        "_introduced_with_version": introduced,
        "is_experimental": property(lambda self: is_experimental_enabled()),
        # Gated classes share a metaclass, so a class can inherit from two of them. The metaclass
        # presented as __class__ is named after the class.
        _PRESENTED_METACLASS: new_class(cls.__name__, (metaclass,)),
        _GATE: Gate(full_name(cls)),
    }.items():
        type.__setattr__(gated, name, value)
    return gated


def _set_metaclass(cls: type[Any], metaclass: Any) -> type[Any]:
    try:
        type.__setattr__(cls, "__class__", metaclass)
    except TypeError as error:
        raise TypeError(
            f"{cls!r} has a metaclass written in C, {type(cls).__name__}, and therefore can't be "
            "gated. Mark it with @experimental_api"
        ) from error
    return cls


def _make_stand_in(cls: type[Any], metaclass: Any) -> type[Any]:
    """Return a subclass with the same contents, which replaces a class."""
    with _hide_subclass_hook(cls):
        subclass: type[Any] = metaclass(
            cls.__name__, (cls,), {"__slots__": (), "__module__": cls.__module__}
        )
    # Set after the class is made, so __set_name__ of descriptors does not run a second time.
    for name, value in vars(cls).items():
        if name not in _NOT_COPIED:
            type.__setattr__(subclass, name, value)
    subclass.__qualname__ = cls.__qualname__
    type.__setattr__(subclass, _PRESENTED_BASES, cls.__bases__)
    return subclass


@cache
def _make_gated_metaclass(root: Any) -> Any:
    """Return a metaclass with the gate. Its parents are those of ``root``, gated."""
    if issubclass(root, GatedMeta):
        return root
    if root is type:
        return new_class("GatedType", (GatedMeta,))
    parents = tuple(
        _make_gated_metaclass(base) for base in root.__bases__ if issubclass(base, type)
    )
    return new_class(f"Gated{root.__name__}", (*parents, root))


def _check_can_be_gated(cls: Any) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r} is not a class: decorate a function with @experimental_fn")
    if isinstance(cls, enum.EnumMeta):
        kind = "an enum, which can't be subclassed and therefore can't be gated"
    elif type(cls).__name__ == "_TypedDictMeta":  # of typing or of typing_extensions
        kind = "a TypedDict: its instances are plain dicts and can't be gated"
    elif vars(cls).get("_is_protocol", False):
        kind = "a protocol, which has no instances to gate"
    else:
        return
    raise TypeError(f"{cls!r} is {kind}. Mark it with @experimental_api")


@contextmanager
def _open_to_class_hooks() -> Iterator[None]:
    earlier = _defining_a_class.get()
    _defining_a_class.set(True)
    try:
        yield
    finally:
        _defining_a_class.set(earlier)


@contextmanager
def _hide_subclass_hook(cls: type[Any]) -> Iterator[None]:
    """Do not call the ``__init_subclass__`` of a class for its gated subclass."""
    defined = vars(cls).get("__init_subclass__")
    type.__setattr__(cls, "__init_subclass__", classmethod(lambda subclass: None))
    try:
        yield
    finally:
        if defined is None:
            type.__delattr__(cls, "__init_subclass__")
        else:
            type.__setattr__(cls, "__init_subclass__", defined)


def _is_from_gated_class(cls: type[Any], name: str) -> bool:
    """Return whether a decorated class defines an attribute, not a subclass or an old parent."""
    for owner in cls.__mro__:
        if name in vars(owner):
            return _GATE in vars(owner)
    return False  # an attribute of the metaclass, or none


def _get_presented_metaclass(cls: type[Any]) -> type[Any]:
    shown: type[Any] = vars(cls).get(_PRESENTED_METACLASS, type(cls))
    return shown


def _get_presented_bases(cls: type[Any]) -> tuple[type[Any], ...]:
    """Return the parents that the user wrote, which documentation shows."""
    shown: tuple[type[Any], ...] | None = vars(cls).get(_PRESENTED_BASES)
    return type.__getattribute__(cls, "__bases__") if shown is None else shown


def _get_presented_signature(cls: type[Any]) -> inspect.Signature:
    return _get_class_signature(cls, without=GatedMeta)


def _get_class_signature(cls: type[Any], *, without: type[type]) -> inspect.Signature:
    """Return the result of ``inspect.signature(cls)`` if a metaclass had no ``__call__``."""
    try:
        return (
            _get_explicit_signature(cls)
            or _get_metaclass_signature(cls, without)
            or _get_constructor_signature(cls)
        )
    except ValueError as error:
        raise AttributeError(f"{cls.__name__} has no signature") from error


def _get_explicit_signature(cls: type[Any]) -> Any:
    # Read as an attribute, not from vars(): pydantic puts a descriptor there.
    is_given = any("__signature__" in vars(base) for base in cls.__mro__)
    return type.__getattribute__(cls, "__signature__") if is_given else None


def _get_metaclass_signature(cls: type[Any], without: type[type]) -> inspect.Signature | None:
    for meta in type(cls).__mro__:
        call = vars(meta).get("__call__")
        if isinstance(call, FunctionType) and meta is not without:
            return signature_of(MethodType(call, cls))
    return None


def _get_constructor_signature(cls: type[Any]) -> inspect.Signature:
    places = ((base, name) for base in cls.__mro__ for name in ("__new__", "__init__"))
    base, name = next((base, name) for base, name in places if name in vars(base))
    method = vars(base)[name]
    method = getattr(method, "__func__", method)
    if isinstance(method, FunctionType):
        return signature_of(MethodType(method, cls))
    # Written in C: use the signature of a class that defines nothing else.
    return signature_of(type(cls.__name__, (base,), {}))


_PRESENTED: Mapping[str, Callable[[type[Any]], Any]] = {
    "__bases__": _get_presented_bases,
    "__class__": _get_presented_metaclass,
    "__signature__": _get_presented_signature,
}
