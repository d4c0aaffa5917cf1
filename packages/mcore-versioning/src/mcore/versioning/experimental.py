"""Functions that run only while experimental code is enabled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar

from packaging.version import InvalidVersion, Version

from mcore.versioning import config
from mcore.versioning.deprecation import blaming_one_further
from mcore.versioning.lookup import constant_when_compiled, owners_of, recorded_version
from mcore.versioning.process_rank import log_on_rank_zero
from mcore.versioning.signatures import full_name, mark_if_coroutine_function, through_descriptor

F = TypeVar("F", bound="Callable[..., Any]")
DEFAULT_LIFETIME = 3
_NAMESPACE = "mcore"


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


class FunctionDecorator(Protocol):
    """A decorator that keeps the function's type and accepts another lifetime."""

    def __call__(self, func: F, max_lifetime: int = DEFAULT_LIFETIME) -> F: ...


class Gate:
    """The gate of one experimental object, which reports its first use."""

    __slots__ = ("name", "unannounced")

    def __init__(self, name: str) -> None:
        self.name = name
        self.unannounced = [True]

    def check(self) -> None:
        """Let the caller pass, or raise ExperimentalNotEnabledError."""
        if not config.is_experimental_enabled():
            self.refuse()
        self.announce()

    def refuse(self) -> None:
        """Raise ExperimentalNotEnabledError."""
        raise ExperimentalNotEnabledError(
            f"{self.name} is experimental, and ENABLE_EXPERIMENTAL is not True. Call "
            "mcore.versioning.set_experimental_flag(True) to allow experimental code, or use "
            "it within `with mcore.versioning.experimental_enabled():`."
        )

    @constant_when_compiled
    def announce(self) -> None:
        """Report the first use. Compiled code reports it during compilation."""
        if not self.unannounced:
            return
        try:
            self.unannounced.pop()  # only one thread gets the item
        except IndexError:
            return
        import logging

        log_on_rank_zero(
            logging.INFO,
            f"ENABLE_EXPERIMENTAL is True, running experimental code. ({self.name})",
        )


def experimental_fn(
    introduced_with_version: str,
    *,
    max_lifetime: int = DEFAULT_LIFETIME,
    current_version: str | None = None,
) -> FunctionDecorator:
    """Gate a function: a call raises unless experimental code is enabled.

    The gate acts at the call, before a coroutine or generator is made. The first call that passes
    writes one INFO record on rank 0 to the logger ``mcore.versioning``. A function that has been
    experimental for more than ``max_lifetime`` minor releases, or across a major release, still
    works. A WARNING record on rank 0 reports it when it is decorated.

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
    check_introduction("experimental_fn", introduced_with_version, max_lifetime, current_version)

    def validator(func: Any, max_lifetime: int = max_lifetime) -> Any:
        check_lifetime(max_lifetime)

        def gate_function(inner: Any) -> Any:
            if isinstance(inner, type):
                raise TypeError(f"{inner!r} is a class: decorate it with @experimental_cls")
            warn_if_expired(inner, introduced_with_version, max_lifetime, current_version)
            gate = Gate(full_name(inner))
            # The gate is one more frame between a deprecation warning inside and the user's line.
            gated: Any = config.checking_before_calls(blaming_one_further(inner), gate.check)
            gated._experimental_api = True
            gated._introduced_with_version = introduced_with_version
            mark_if_coroutine_function(gated, inner)
            return gated

        return through_descriptor(func, gate_function)

    return validator


def check_introduction(
    decorator: str, introduced: str, max_lifetime: int, current_version: str | None
) -> None:
    """Reject meaningless arguments of an experimental decorator."""
    if not isinstance(introduced, str):
        raise TypeError(
            f"@{decorator} needs the version that introduced the object, not {introduced!r}. "
            f'Write @{decorator}("0.1.0")'
        )
    Version(introduced)
    if current_version is not None:
        Version(current_version)
    check_lifetime(max_lifetime)


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
    text = recorded_version(owners[0])
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


@cache
def _find_owners(top_level: str) -> frozenset[str]:
    """Return the distributions with modules in a top-level package, looked up once per process."""
    return frozenset(owners_of(top_level))
