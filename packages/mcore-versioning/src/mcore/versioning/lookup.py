"""The version of one installed package, found without importing it where that can be avoided."""

from __future__ import annotations

import sys
from functools import lru_cache

from packaging.version import InvalidVersion, Version

_NOT_LOADED = object()


class InstalledPackage:
    """One package and what was found out about it; absence is never kept.

    State is replaced by single assignments: at worst two threads read the same metadata.
    """

    __slots__ = ("_loaded", "_recorded", "distribution", "module")

    def __init__(self, module: str, distribution: str) -> None:
        self.module = module
        self.distribution = distribution
        self.forget()

    def forget(self) -> None:
        """Drop what was found."""
        # The loaded module, its `__version__` and, if that is readable, the version in it.
        self._loaded: tuple[object, object, Version | None] = (None, None, None)
        self._recorded: Version | None = None

    def version(self) -> Version | None:
        """Look into the loaded module, then the metadata, at last import a module without metadata.

        None in ``sys.modules`` means absent; a version that nobody can read is an InvalidVersion.
        """
        module = sys.modules.get(self.module, _NOT_LOADED)
        if module is None:
            return None
        if module is _NOT_LOADED:
            return self._recorded_version() or self._version_after_import()
        return (
            self._loaded_version(module)
            or self._recorded_version()
            or self._absent_unless_unreadable(module)
        )

    def is_at_least(
        self, version: str | Version, check_equality: bool = True, *, release_only: bool = False
    ) -> bool:
        """Return whether the package is there in this version or newer."""
        requested = parse_version(version)
        installed = self.version()
        return installed is not None and is_at_least(
            installed, requested, check_equality, release_only=release_only
        )

    def _loaded_version(self, module: object) -> Version | None:
        raw = getattr(module, "__version__", None)
        known_module, known_raw, version = self._loaded
        if raw is not known_raw or module is not known_module:
            version = _readable_version(raw)
            self._loaded = (module, raw, version)
        return version

    def _recorded_version(self) -> Version | None:
        if self._recorded is not None:
            return self._recorded
        from importlib.metadata import PackageNotFoundError, version

        try:
            text = version(self.distribution)
        except (PackageNotFoundError, KeyError):
            return None
        if text is None:  # metadata without a Version field; later Pythons raise KeyError
            return None
        try:
            self._recorded = Version(text)
        except InvalidVersion as error:
            raise InvalidVersion(
                f"the metadata of {self.distribution} gives {text!r}, which is no version"
            ) from error
        return self._recorded

    def _version_after_import(self) -> Version | None:
        import importlib
        from importlib.util import find_spec

        try:
            if find_spec(self.module) is None:
                return None
            module = importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            import logging

            logging.getLogger("mcore.versioning").debug(
                "%s counts as absent: importing it failed with %r", self.module, error
            )
            return None
        return self._loaded_version(module) or self._absent_unless_unreadable(module)

    def _absent_unless_unreadable(self, module: object) -> Version | None:
        raw = getattr(module, "__version__", None)
        if isinstance(raw, str) and raw:
            raise InvalidVersion(
                f"{self.module}.__version__ is {raw!r}, which is no version, and the distribution "
                f"{self.distribution} has no metadata that gives one"
            )
        return None


_packages: dict[tuple[str, str], InstalledPackage] = {}


def known_package(module: str, distribution: str | None = None) -> InstalledPackage:
    """The one object that looks for a package; the distribution is named ``module`` by default."""
    key = (module, distribution or module)
    return _packages.get(key) or _packages.setdefault(key, InstalledPackage(*key))


def clear_version_cache() -> None:
    """Forget all versions that were found.

    Needed after an upgrade in a running process, and after another ``__version__`` was patched into
    a loaded module. Replacing the module in ``sys.modules``, also by None, is noticed without it.

    Example:
        >>> clear_version_cache()
    """
    for package in tuple(_packages.values()):
        package.forget()


def is_at_least(
    installed: Version,
    requested: Version,
    check_equality: bool = True,
    *,
    release_only: bool = False,
) -> bool:
    """Return whether one version is at least, or else newer than, another by packaging's order.

    For "newer" a local label such as ``+cpu`` makes no difference, unless the request carries one.
    """
    if release_only:
        installed = _release(installed)
    if check_equality:
        return installed >= requested
    if requested.local is None:
        installed = _without_label(installed)
    return installed > requested


def parse_version(version: str | Version) -> Version:
    """Return a requested version as a ``Version``."""
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


def _readable_version(raw: object) -> Version | None:
    """The version in a ``__version__``, which may be a ``str``, a subclass of it or a Version."""
    if not isinstance(raw, (str, Version)):
        return None
    try:
        return Version(str(raw))
    except InvalidVersion:
        return None
