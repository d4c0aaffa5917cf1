"""When experimental code has been experimental for too long."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from packaging.version import InvalidVersion, Version

from mcore.versioning.process_rank import log_on_rank_zero
from mcore.versioning.wrapping import full_name

_NAMESPACE = "mcore"


def has_expired(introduced: Version, current: Version, max_lifetime: int) -> bool:
    """Whether more than `max_lifetime` minor releases, or a major one, have gone by.

    Example:
        >>> has_expired(Version("0.1.0"), Version("0.4.0"), 3)
        False
        >>> has_expired(Version("0.19.0"), Version("1.0.0"), 3)
        True
    """
    if introduced.major != current.major:
        return current.major > introduced.major
    return introduced.minor + max_lifetime < current.minor


def warn_if_expired(
    target: Any, introduced: str, max_lifetime: int, current_version: str | None
) -> None:
    """Log a warning, on rank 0 only, if an experimental object has reached its end of life.

    Args:
        target: The function or class.
        introduced: The version that introduced it.
        max_lifetime: How many minor releases it may stay experimental.
        current_version: The version of today; by default that of the distribution that owns the
            object's module. Where that is unknown nothing is checked.
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
    """The version of the distribution that a module belongs to, None where that is unknown.

    Args:
        module: `mcore.tensor.x` belongs to `mcore-tensor`; any other module to the distribution
            that provides its top-level package.
    """
    from importlib.metadata import PackageNotFoundError, version

    distribution = _owner(module)
    if distribution is None:
        return None
    try:
        return Version(version(distribution))
    except (PackageNotFoundError, InvalidVersion, TypeError, KeyError):
        return None  # not installed, or metadata without a readable version


def _owner(module: str) -> str | None:
    top_level, *rest = module.split(".")
    if top_level == _NAMESPACE:
        return f"{_NAMESPACE}-{rest[0]}" if rest else None
    if top_level in ("", "__main__"):
        return None
    owners = _owners_of(top_level)
    if len(owners) > 1:
        return None  # a namespace that several distributions share
    # An editable installation lists no packages: it is found if it is named like its package.
    return next(iter(owners), top_level)


@cache
def _owners_of(top_level: str) -> frozenset[str]:
    """The distributions with modules in a top-level package, looked up once per process.

    `importlib.metadata.packages_distributions` finds the same, but takes all records apart, which
    costs several times as much, and on Python 3.10 it overlooks distributions without a
    `top_level.txt`.
    """
    from importlib.metadata import distributions

    in_the_package = re.compile(rf'^"?{re.escape(top_level)}(/.*|\.[^/\n]*)?\.(py|so|pyd)"?,', re.M)
    return frozenset(
        distribution.metadata["Name"]
        for distribution in distributions()
        if top_level in (distribution.read_text("top_level.txt") or "").split()
        or in_the_package.search(distribution.read_text("RECORD") or "")
    )
