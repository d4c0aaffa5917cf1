"""Functions and classes that can be used only while experimental code is enabled."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar

from packaging.version import Version

from mcore.versioning import config
from mcore.versioning.deprecation import blaming_one_further, wrap_init, wrap_init_subclass
from mcore.versioning.lookup import (
    constant_when_compiled,
    owners_of,
    read_version_text,
    recorded_version,
)
from mcore.versioning.process_rank import log_on_rank_zero
from mcore.versioning.signatures import full_name, mark_if_coroutine_function, through_descriptor

F = TypeVar("F", bound="Callable[..., Any]")
DEFAULT_LIFETIME = 3
_NAMESPACE = "mcore"
GateCall = Callable[[Callable[..., Any]], Callable[..., Any]]


class ExperimentalNotEnabledError(Exception):
    """Raised when experimental code is used while ``ENABLE_EXPERIMENTAL`` is not set.

    Example:
        >>> @experimental_fn("0.1.0")
        ... def fast_path(): ...
        >>> try:
        ...     fast_path()
        ... except ExperimentalNotEnabledError as error:
        ...     "ENABLE_EXPERIMENTAL" in str(error)
        True
    """


class Decorator(Protocol):
    """A decorator that keeps the type of its target and accepts another lifetime."""

    def __call__(self, target: F, /, max_lifetime: int = DEFAULT_LIFETIME) -> F: ...


def _make_gate(name: str) -> GateCall:
    """Return a function that gates the calls of one experimental object and reports its first."""
    pending, unannounced = [True], [True]

    @constant_when_compiled  # compiled code reports the first use during compilation
    def log_first_use() -> None:
        try:
            unannounced.pop()  # only one thread gets the item
        except IndexError:
            return
        import logging

        log_on_rank_zero(
            logging.INFO,
            f"ENABLE_EXPERIMENTAL is True, running experimental code. ({name})",
        )

    def announce() -> None:
        pending.clear()
        log_first_use()

    # Compiled code reads the list, so torch refuses a change of it during compilation.
    announce._torchdynamo_inline = log_first_use  # type: ignore[attr-defined]

    def refuse() -> None:
        raise ExperimentalNotEnabledError(
            f"{name} is experimental, and ENABLE_EXPERIMENTAL is not True. Call "
            "mcore.versioning.set_experimental_flag(True) to allow experimental code, or use "
            "it within `with mcore.versioning.experimental_enabled():`."
        )

    # A function: torch.compile cannot read methods in the __init__ of a new object.
    def check() -> None:
        if config.is_experimental_enabled():
            announce()
        # Activation checkpointing repeats a forward in the backward pass, which may follow the
        # block that enabled it.
        elif unannounced or not _is_in_backward_pass():
            refuse()

    def gate_call(call: Callable[..., Any]) -> Callable[..., Any]:
        # The gate is one more frame between a deprecation warning inside and the user's line.
        return config.checking_before_calls(blaming_one_further(call), check, pending)

    return gate_call


@constant_when_compiled
def _is_in_backward_pass() -> bool:
    torch = sys.modules.get("torch")
    current = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return current is not None and current() != -1


def experimental_fn(
    introduced_with_version: str,
    *,
    max_lifetime: int = DEFAULT_LIFETIME,
    current_version: str | None = None,
) -> Decorator:
    """Gate a function: a call raises unless experimental code is enabled.

    The gate acts at the call, before a coroutine or generator is made. The first call that passes
    writes one INFO record on rank 0 to the logger ``mcore.versioning``. A function that has been
    experimental for more than ``max_lifetime`` minor releases, or across a major release, still
    works. A WARNING record on rank 0 reports it when it is decorated. A function that has run may
    also run in a backward pass, where activation checkpointing repeats the forward.

    Args:
        introduced_with_version: The version of the function's distribution that introduced it.
        max_lifetime: Minor releases for which it may stay experimental. Also accepted as the
            second argument of the decorator.
        current_version: The current version, by default that of the distribution that owns the
            function's module. If that is unknown, nothing is checked.

    Returns:
        A decorator for functions, methods, classmethods, staticmethods and properties. The result
        has the signature of the function and the attributes ``_experimental_api`` and
        ``_introduced_with_version``.

    Raises:
        ExperimentalNotEnabledError: At a call while experimental code is disabled.
        packaging.version.InvalidVersion: One of the versions is not valid.
        TypeError: Used without arguments, or on a class, or ``max_lifetime`` is not an int.
        ValueError: ``max_lifetime`` is negative.

    Example:
        >>> @experimental_fn("0.1.0")
        ... def fast_path(x):
        ...     return 2 * x
        >>> with config.experimental_enabled():
        ...     fast_path(4)
        8
    """
    return _make_decorator(
        "experimental_fn", introduced_with_version, max_lifetime, current_version, _gate_function
    )


def experimental_cls(
    introduced_with_version: str,
    *,
    max_lifetime: int = DEFAULT_LIFETIME,
    current_version: str | None = None,
) -> Decorator:
    """Gate a class: making an instance raises unless experimental code is enabled.

    So does making an instance of a subclass, and calling a public class method or static method of
    the decorated class through the class or a subclass. Everything else works at any time:
    methods of existing instances, also class methods and static methods called through them, data
    attributes, defining subclasses, copying and unpickling, ``isinstance``, type hints.
    ``is_experimental``, on the class and on instances, is True while the gate is open.

    The gate is in ``__init__``: a ``__new__`` runs before it. Unpickling an exception is a call
    and gated. ``torch.compile`` gates new instances only. The first use, the end of life and
    backward passes are as for ``experimental_fn``.

    Put the decorator above all others that change the class, such as ``dataclasses.dataclass``.

    Args:
        introduced_with_version: The version of the class's distribution that introduced it.
        max_lifetime: Minor releases for which it may stay experimental. Also accepted as the
            second argument of the decorator.
        current_version: The current version, by default that of the distribution that owns the
            class's module. If that is unknown, nothing is checked.

    Returns:
        A decorator for classes, which changes the class in place. The class has the attributes
        ``_experimental_api`` and ``_introduced_with_version``.

    Raises:
        ExperimentalNotEnabledError: At use while experimental code is disabled.
        packaging.version.InvalidVersion: One of the versions is not valid.
        TypeError: Used without arguments, on an object that is not a class, or on a class that
            can't be gated: an enum, a ``TypedDict`` or a protocol. Also if ``max_lifetime`` is not
            an int.
        ValueError: ``max_lifetime`` is negative.

    Example:
        >>> @experimental_cls("0.1.0")
        ... class Cache:
        ...     def __init__(self, size):
        ...         self.size = size
        >>> Cache.is_experimental
        False
        >>> with config.experimental_enabled():
        ...     Cache(8).size
        8
    """
    return _make_decorator(
        "experimental_cls", introduced_with_version, max_lifetime, current_version, _gate_class
    )


def _make_decorator(
    name: str,
    introduced: str,
    max_lifetime: int,
    current_version: str | None,
    gate_target: Callable[[Any, GateCall], Any],
) -> Decorator:
    if not isinstance(introduced, str):
        raise TypeError(
            f"@{name} needs the version that introduced the object, not {introduced!r}. "
            f'Write @{name}("0.1.0")'
        )
    for version in (introduced, current_version):
        if version is not None:
            Version(version)
    check_lifetime(max_lifetime)

    def validator(target: Any, /, max_lifetime: int = max_lifetime) -> Any:
        check_lifetime(max_lifetime)

        def gate(inner: Any) -> Any:
            gated = gate_target(inner, _make_gate(full_name(inner)))
            warn_if_expired(inner, introduced, max_lifetime, current_version)
            # Past the metaclass of a class, which may refuse to set attributes.
            set_attribute: Any = type.__setattr__ if isinstance(gated, type) else setattr
            set_attribute(gated, "_experimental_api", True)
            set_attribute(gated, "_introduced_with_version", introduced)
            return gated

        return through_descriptor(target, gate)

    return validator


def _gate_function(func: Any, gate_call: GateCall) -> Any:
    if isinstance(func, type):
        raise TypeError(f"{func!r} is a class: decorate it with @experimental_cls")
    gated = gate_call(func)
    mark_if_coroutine_function(gated, func)
    return gated


def _check_can_be_gated(cls: Any) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r} is not a class: decorate a function with @experimental_fn")
    if isinstance(cls, enum.EnumMeta):
        kind = "an enum, whose calls are look-ups"
    elif type(cls).__name__ == "_TypedDictMeta":  # of typing or of typing_extensions
        kind = "a TypedDict: its instances are plain dicts and can't be gated"
    elif vars(cls).get("_is_protocol", False):
        kind = "a protocol, which has no instances to gate"
    else:
        return
    raise TypeError(f"{cls!r} is {kind}. Mark it with @experimental_api")


def _gate_class(cls: Any, gate_call: GateCall) -> Any:
    """Gate a class in place. Past the metaclass, which may refuse to set attributes."""
    _check_can_be_gated(cls)
    wrap_init(cls, gate_call)
    for name, value in list(vars(cls).items()):
        if isinstance(value, (classmethod, staticmethod)) and not name.startswith("_"):
            is_of_class = isinstance(value, classmethod)
            method: Any = (_GatedClassMethod if is_of_class else _GatedStaticMethod)(value.__func__)
            vars(method).update(vars(value))
            gated = gate_call(value.__func__)
            method.gated = classmethod(gated) if is_of_class else staticmethod(gated)
            type.__setattr__(cls, name, method)
    # A dataclass that extends the class gets an __init__ of its own after __init_subclass__.
    finish = vars(cls).get("__post_init__", lambda self, *args: None)
    type.__setattr__(cls, "__post_init__", gate_call(finish))

    def gate_subclass(call_own: Callable[..., Any]) -> Callable[..., Any]:
        def gate_constructors(subclass: type[Any], /, **options: Any) -> None:
            call_own(subclass, **options)
            for name in ("__init__", "__post_init__"):
                defined = vars(subclass).get(name)
                if defined is not None:
                    type.__setattr__(subclass, name, gate_call(defined))

        return gate_constructors

    wrap_init_subclass(cls, gate_subclass)
    type.__setattr__(cls, "is_experimental", _IsExperimental())
    return cls


class _GatedMethod:
    gated: Any  # the method with the gate

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        found: Any = self.gated if instance is None else super()
        return found.__get__(instance, owner)


class _GatedClassMethod(_GatedMethod, classmethod):  # type: ignore[type-arg]
    """A class method that is gated if it is called through the class."""


class _GatedStaticMethod(_GatedMethod, staticmethod):  # type: ignore[type-arg]
    """A static method that is gated if it is called through the class."""


class _IsExperimental:
    """The attribute ``is_experimental`` of gated classes and their instances."""

    def __get__(self, instance: object, owner: object = None) -> bool:
        return config.is_experimental_enabled()


def check_lifetime(max_lifetime: int) -> None:
    """Reject a lifetime that is not a number of releases."""
    is_number = hasattr(max_lifetime, "__index__") and not isinstance(max_lifetime, bool)
    if not is_number or max_lifetime < 0:
        raise (ValueError if is_number else TypeError)(
            f"max_lifetime must be a number of minor releases, 0 or more, not {max_lifetime!r}"
        )


def has_expired(introduced: Version, current: Version, max_lifetime: int) -> bool:
    """Return whether more than ``max_lifetime`` minor releases, or a major release, have passed."""
    # Releases across a major version cannot be counted: the last minor number is unknown.
    if introduced.major != current.major:
        return current.major > introduced.major
    return introduced.minor + max_lifetime < current.minor


def warn_if_expired(
    target: Any, introduced: str, max_lifetime: int, current_version: str | None
) -> None:
    """Log a warning, on rank 0, if an experimental object has reached its end of life.

    If the current version is neither given nor known, nothing is checked.
    """
    if current_version is not None:
        current: Version | None = Version(current_version)
    else:
        current = owner_version(getattr(target, "__module__", None) or "")
    if current is not None and has_expired(Version(introduced), current, max_lifetime):
        import logging

        log_on_rank_zero(
            logging.WARNING,
            f"{full_name(target)} has reached end of life: it has been experimental since version "
            f"{introduced}, and this is version {current}. Make it stable or remove it.",
        )


def owner_version(module: str) -> Version | None:
    """Return the version of the distribution that owns a module, None if it is unknown."""
    top_level, *rest = module.split(".")
    if top_level in ("", "__main__"):
        return None
    if top_level == _NAMESPACE:
        owners = [f"{_NAMESPACE}-{part}" for part in rest[:1]]
    else:
        # An editable installation lists no packages. It is found if it has its package's name.
        owners = list(_find_owners(top_level)) or [top_level]
    if len(owners) != 1:
        return None  # a namespace that several distributions share
    text = read_version_text(recorded_version(owners[0]))
    return None if text is None else Version(text)


@cache
def _find_owners(top_level: str) -> frozenset[str]:
    """Return the distributions with modules in a top-level package, looked up once per process."""
    return frozenset(owners_of(top_level))
