"""How the version of one package is found, without importing it where that can be avoided."""

from __future__ import annotations

import sys
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from mcore.versioning.comparison import is_at_least, parse_version

_NOT_LOADED = object()
_REMEMBERED_REQUESTS = 256


class _Loaded(NamedTuple):
    """What the loaded module says.

    Attributes:
        module: The module.
        raw: The object in its `__version__`.
        version: The version that it stands for, if it is readable.
        least: The least that any rule of comparison makes of that version.
    """

    module: object
    raw: object
    version: Version | None = None
    least: Version | None = None


_NOTHING_LOADED = _Loaded(None, None)


class InstalledPackage:
    """One package and what was found out about it.

    What was found is kept; absence is not, so that a package installed later is seen. All state is
    replaced by single assignments, which makes concurrent lookups safe: at worst two threads read
    the same metadata.

    Args:
        module: The name to import, with dots for a submodule.
        distribution: The name of the distribution that brings it.
    """

    __slots__ = ("_loaded", "_recorded", "distribution", "module", "older_requests")

    def __init__(self, module: str, distribution: str) -> None:
        self.module = module
        self.distribution = distribution
        # Requests that a module is newer than, by every rule, with that module.
        self.older_requests: dict[str | Version, object] = {}
        self._loaded = _NOTHING_LOADED
        self._recorded: Version | None = None

    def forget(self) -> None:
        """Drop what was found."""
        self.older_requests.clear()
        self._loaded = _NOTHING_LOADED
        self._recorded = None

    def version(self) -> Version | None:
        """The version, or None where the package is absent.

        In this order: an entry None in `sys.modules` means absent; `__version__` of the module if
        it is loaded; the metadata of the distribution; `__version__` after importing the module,
        for a source tree on the path that has no metadata.

        Raises:
            packaging.version.InvalidVersion: The package is there, but neither `__version__` nor
                the metadata holds a version; the text names the package.
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
        """Whether the package is there in this version or newer; see `comparison.is_at_least`."""
        requested = parse_version(version)
        installed = self.version()
        if installed is None:
            return False
        loaded = self._loaded
        if loaded.version is installed and loaded.least is not None and requested < loaded.least:
            self._remember(version, loaded.module)
            return True
        return is_at_least(installed, requested, check_equality, release_only=release_only)

    def _remember(self, version: str | Version, module: object) -> None:
        if len(self.older_requests) >= _REMEMBERED_REQUESTS:
            self.older_requests.clear()
        self.older_requests[version] = module

    def _loaded_version(self, module: object) -> Version | None:
        raw = getattr(module, "__version__", None)
        loaded = self._loaded
        if raw is not loaded.raw or module is not loaded.module:
            self.older_requests.clear()
            self._loaded = loaded = _read(module, raw)
        return loaded.version

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
    """The one object that looks for a package; the distribution is named `module` by default."""
    key = (module, distribution or module)
    return _packages.get(key) or _packages.setdefault(key, InstalledPackage(*key))


def clear_version_cache() -> None:
    """Forget all versions that were found.

    Needed after an upgrade in a running process, and after another `__version__` was patched into
    a loaded module. Replacing the module in `sys.modules`, also by None, is noticed without it.

    Example:
        >>> clear_version_cache()
    """
    for package in tuple(_packages.values()):
        package.forget()


def _read(module: object, raw: object) -> _Loaded:
    if not isinstance(raw, (str, Version)):
        return _Loaded(module, raw)
    try:
        version = Version(str(raw))
    except InvalidVersion:
        return _Loaded(module, raw)
    least = min(Version(version.public), Version(version.base_version))
    return _Loaded(module, raw, version, least)
