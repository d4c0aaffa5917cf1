"""What the checks for a minimum version have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from packaging.version import Version

from mcore.versioning.lookup import InstalledPackage


class MinimumCheck(Protocol):
    """A function that tells whether a package is there in some version or newer."""

    def __call__(
        self,
        version: str | Version,
        check_equality: bool = True,
        *,
        release_only: bool = False,
    ) -> bool: ...


Check = TypeVar("Check", bound=MinimumCheck)


def remembering(package: InstalledPackage) -> Callable[[Check], Check]:
    """Decorate a minimum check of `package` so that it answers known requests at once.

    Most checks ask for something clearly older than what is loaded. Such a request is remembered
    with the module that answered it, and holds for as long as that is the loaded one: a module
    that is blocked or replaced in `sys.modules` is noticed.
    """

    def decorate(check: Check) -> Check:
        older_requests, module, modules = package.older_requests, package.module, sys.modules

        @wraps(check)
        def remembered(
            version: str | Version, check_equality: bool = True, *, release_only: bool = False
        ) -> bool:
            try:
                if older_requests[version] is modules[module]:
                    return True
            except (KeyError, TypeError):  # unknown, not loaded, or not even hashable
                pass
            return check(version, check_equality, release_only=release_only)

        return cast("Check", remembered)

    return decorate


def taking_vers(check: Callable[..., bool]) -> Callable[..., bool]:
    """Accept `vers` as another name of the keyword `version`."""

    @wraps(check)
    def renaming(*args: Any, **kwargs: Any) -> bool:
        if "vers" in kwargs:
            if args or "version" in kwargs:
                raise TypeError("pass the version once: as `version` or as `vers`, not as both")
            kwargs["version"] = kwargs.pop("vers")
        return check(*args, **kwargs)

    return renaming
