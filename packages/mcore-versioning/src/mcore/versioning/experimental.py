"""Functions that run only while experimental code is switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from packaging.version import Version

from mcore.versioning import config
from mcore.versioning.deprecated_functions import blaming_one_further
from mcore.versioning.end_of_life import warn_if_expired
from mcore.versioning.process_rank import log_on_rank_zero
from mcore.versioning.wrapping import full_name, mark_if_coroutine_function, through_descriptor

F = TypeVar("F", bound="Callable[..., Any]")
DEFAULT_LIFETIME = 3


class ExperimentalNotEnabledError(Exception):
    """Raised when experimental code is used while `ENABLE_EXPERIMENTAL` is not set.

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
    """Takes a function, and on request another lifetime, and keeps the function's type."""

    def __call__(self, func: F, max_lifetime: int = DEFAULT_LIFETIME) -> F: ...


class Gate:
    """Decides about one experimental object, and says once that it is in use.

    Args:
        name: The qualified name of the object.

    Attributes:
        unannounced: Not empty until the log record has been written.
    """

    __slots__ = ("name", "unannounced")

    def __init__(self, name: str) -> None:
        self.name = name
        self.unannounced = [True]

    def check(self) -> None:
        """Let the caller pass, or raise ExperimentalNotEnabledError."""
        if not config.is_experimental_enabled():
            raise ExperimentalNotEnabledError(
                f"{self.name} is experimental, and ENABLE_EXPERIMENTAL is not True. Call "
                "mcore.versioning.set_experimental_flag(True) to allow experimental code, or use "
                "it within `with mcore.versioning.experimental_enabled():`."
            )
        if self.unannounced:
            self._announce()

    def _announce(self) -> None:
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
    """Gate a function: calling it raises, unless experimental code is switched on.

    The gate acts at the call, before a coroutine or generator is made. The first call that passes
    writes one INFO record on rank 0 to the logger `mcore.versioning`. A function that has been
    experimental for more than `max_lifetime` minor releases, or over a major release, still works;
    a WARNING record on rank 0 says so when it is decorated.

    Args:
        introduced_with_version: The version of the function's own distribution that brought it.
        max_lifetime: Minor releases for which it may stay experimental; the decorator takes this
            as a second argument too.
        current_version: The version of today; by default that of the distribution that owns the
            function's module, and no check where that is unknown.

    Returns:
        A decorator for functions, methods, classmethods, staticmethods and properties. The result
        has the signature of the function and the attributes `_experimental_api` and
        `_introduced_with_version`.

    Raises:
        ExperimentalNotEnabledError: At a call, while experimental code is switched off.
        packaging.version.InvalidVersion: One of the versions is none.
        TypeError: Used without arguments, or on a class.
        ValueError: `max_lifetime` is negative.

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
            return _gated(inner, introduced_with_version)

        return through_descriptor(func, gate_function)

    return validator


def check_introduction(
    decorator: str, introduced: str, max_lifetime: int, current_version: str | None
) -> None:
    """Refuse arguments of an experimental decorator that mean nothing."""
    if not isinstance(introduced, str):
        raise TypeError(
            f"@{decorator} needs the introducing version, not {introduced!r}; "
            f'write @{decorator}("0.1.0")'
        )
    Version(introduced)
    if current_version is not None:
        Version(current_version)
    check_lifetime(max_lifetime)


def check_lifetime(max_lifetime: int) -> None:
    """Refuse a lifetime that is no number of releases."""
    if max_lifetime < 0:
        raise ValueError(f"max_lifetime counts minor releases from 0 on, not {max_lifetime}")


def _gated(func: Any, introduced: str) -> Any:
    gate = Gate(full_name(func))
    gated: Any = config.checking_before_calls(blaming_one_further(func), gate.check)
    gated._experimental_api = True
    gated._introduced_with_version = introduced
    mark_if_coroutine_function(gated, func)
    return gated
