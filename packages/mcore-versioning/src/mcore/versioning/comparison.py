"""When an installed version is at least a requested one."""

from __future__ import annotations

from functools import lru_cache

from packaging.version import Version


def is_at_least(
    installed: Version,
    requested: Version,
    check_equality: bool = True,
    *,
    release_only: bool = False,
) -> bool:
    """Whether `installed` is `requested` or newer, in the order of `packaging.version.Version`.

    Pre-releases, development releases included, are older than their release; post releases are
    newer. For "strictly newer" a local label such as `+cpu` makes no difference, unless the request
    carries one too: `2.13.0+cpu` is not newer than `2.13.0`.

    Args:
        installed: The version that is there.
        requested: The version to compare with.
        check_equality: False asks for strictly newer.
        release_only: Compare only the release number of `installed`, so that builds of a coming
            release (`2.9.0a0+50eac811a6.nv25.09`) count as that release.

    Example:
        >>> is_at_least(Version("2.13.0+cpu"), Version("2.13.0"))
        True
        >>> is_at_least(Version("2.13.0+cpu"), Version("2.13.0"), check_equality=False)
        False
    """
    if release_only:
        installed = _release(installed)
    if check_equality:
        return installed >= requested
    if requested.local is None:
        installed = _without_label(installed)
    return installed > requested


def parse_version(version: str | Version) -> Version:
    """A requested version as a `Version`.

    Raises:
        packaging.version.InvalidVersion: The text is no version.
        TypeError: It is neither text nor a `Version`.

    Example:
        >>> parse_version("2.6")
        <Version('2.6')>
    """
    if isinstance(version, Version):
        return version
    if not isinstance(version, str):
        raise TypeError(f"a version is a str or a packaging Version, not {version!r}")
    return _parse(version)


@lru_cache(maxsize=64)
def _release(version: Version) -> Version:
    return Version(version.base_version)


@lru_cache(maxsize=64)
def _without_label(version: Version) -> Version:
    return Version(version.public)


@lru_cache(maxsize=256)
def _parse(version: str) -> Version:
    return Version(version)
