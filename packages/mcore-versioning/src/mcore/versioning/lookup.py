"""The version of one installed package, found without importing it where that can be avoided."""

from __future__ import annotations

import sys
from functools import lru_cache

from packaging.version import InvalidVersion, Version

_NOT_LOADED = object()


class InstalledPackage:
    """One package and its version once that is found; absence is never cached.

    State is replaced by single assignments: at worst two threads read the same metadata.
    """

    __slots__ = ("_loaded", "_recorded", "distribution", "module")

    def __init__(self, module: str, distribution: str) -> None:
        self.module = module
        self.distribution = distribution
        self.forget()

    def forget(self) -> None:
        """Drop what was found."""
        # The loaded module, its `__version__` and, if that is readable, the text of it.
        self._loaded: tuple[object, object, str | None] = (None, None, None)
        self._recorded: str | None = None

    def version(self) -> Version | None:
        """The version, None where the package is absent; an unreadable one is an InvalidVersion."""
        text = self._text()
        return None if text is None else _parse(text)

    def is_at_least(
        self, version: str | Version, check_equality: bool = True, release_only: bool = False
    ) -> bool:
        """Return whether the package is installed in at least this version."""
        module, raw, installed = self._loaded
        if (
            installed is None
            or sys.modules.get(self.module) is not module
            or (getattr(module, "__version__", None) is not raw)
        ):
            installed = self._text()
        if installed is None:
            parse_version(version)  # an invalid request is an error all the same
            return False
        try:
            return _is_at_least(installed, version, check_equality, release_only)
        except TypeError:
            parse_version(version)  # raises the right error for what cannot be hashed
            raise

    def _text(self) -> str | None:
        """Look in the loaded module, then in the metadata; import a module without metadata.

        None in ``sys.modules`` means absent; an unreadable version raises InvalidVersion.
        """
        module = sys.modules.get(self.module, _NOT_LOADED)
        if module is None:
            return None
        if module is _NOT_LOADED:
            return self._recorded_version() or self._version_after_import()
        text = self._loaded_version(module) or self._recorded_version()
        if text is None:
            self._refuse_unreadable(module)
        return text

    def _loaded_version(self, module: object) -> str | None:
        raw = getattr(module, "__version__", None)
        known_module, known_raw, text = self._loaded
        if raw is not known_raw or module is not known_module:
            text = _readable_text(raw)
            self._loaded = (module, raw, text)
        return text

    def _recorded_version(self) -> str | None:
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
            _parse(text)
        except InvalidVersion as error:
            raise InvalidVersion(
                f"the metadata of {self.distribution} gives {text!r}, which is not a version"
            ) from error
        self._recorded = text
        return text

    def _version_after_import(self) -> str | None:
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
        text = self._loaded_version(module)
        if text is None:
            self._refuse_unreadable(module)
        return text

    def _refuse_unreadable(self, module: object) -> None:
        raw = getattr(module, "__version__", None)
        if isinstance(raw, str) and raw:
            raise InvalidVersion(
                f"{self.module}.__version__ is {raw!r}, which is not a version, and the "
                f"distribution {self.distribution} has no metadata that gives one"
            )


_packages: dict[tuple[str, str], InstalledPackage] = {}


def known_package(module: str, distribution: str | None = None) -> InstalledPackage:
    """Return the one object that looks up a package; the distribution defaults to ``module``."""
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
        installed = Version(installed.base_version)
    if check_equality:
        return installed >= requested
    if requested.local is None:
        installed = Version(installed.public)
    return installed > requested


def parse_version(version: str | Version) -> Version:
    """Return a requested version as a ``Version``."""
    if isinstance(version, Version):
        return version
    if not isinstance(version, str):
        raise TypeError(f"a version must be a str or a packaging Version, not {version!r}")
    return _parse(version)


@lru_cache(maxsize=256)
def _parse(version: str) -> Version:
    return Version(version)


@lru_cache(maxsize=256)
def _is_at_least(
    installed: str, requested: str | Version, check_equality: bool, release_only: bool
) -> bool:
    return is_at_least(
        _parse(installed), parse_version(requested), check_equality, release_only=release_only
    )


def _readable_text(raw: object) -> str | None:
    """Return the text of a ``__version__``: a ``str``, a subclass of it or a Version."""
    if not isinstance(raw, (str, Version)):
        return None
    try:
        return str(_parse(str(raw)))
    except InvalidVersion:
        return None
