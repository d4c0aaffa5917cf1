"""The version of an installed package, found without importing it if that can be avoided."""

from __future__ import annotations

import sys
from functools import lru_cache

from packaging.version import InvalidVersion, Version

from mcore.versioning.compiled import constant_when_compiled
from mcore.versioning.distributions import owners_of

_NOT_LOADED = object()
_LIMIT = 256

# Versions of installed packages, by their texts. A dict, since torch.compile can read it.
_versions: dict[str, Version] = {}


class InstalledPackage:
    """One package and its version once that is found. Absence is never cached.

    State is replaced by single assignments: at worst two threads read the same metadata.
    """

    __slots__ = ("_recorded", "distribution", "loaded", "module")

    def __init__(self, module: str, distribution: str) -> None:
        self.module = module
        self.distribution = distribution
        self.forget()

    def forget(self) -> None:
        """Drop the found version."""
        # The `__version__` of the loaded module and cached answers about it. Another object in
        # the module, even an equal one, invalidates them.
        self.loaded: tuple[object, dict[str | Version, bool]] = (None, {})
        self._recorded: str | None = None

    def version(self) -> Version | None:
        """The version, None if the package is absent. An unreadable version raises."""
        text = self.text()
        return None if text is None else _versions[text]

    def is_at_least(
        self, version: str | Version, check_equality: bool = True, release_only: bool = False
    ) -> bool:
        """Return whether the package is installed in at least this version."""
        wanted = parse_version(version)  # an invalid request is an error for an absent package too
        installed = self.text()
        if installed is None:
            return False
        found = _versions[installed]
        answer = is_at_least(found, wanted, check_equality, release_only=release_only)
        raw, answers = self.loaded
        if check_equality and not release_only and installed == _readable_text(raw):
            if len(answers) >= _LIMIT:
                answers.clear()
            answers[version] = answer
        return answer

    @constant_when_compiled
    def text(self) -> str | None:
        """Look in the loaded module, then in the metadata. Import a module without metadata.

        None in ``sys.modules`` means absent. An unreadable version raises InvalidVersion.
        """
        module = sys.modules.get(self.module, _NOT_LOADED)
        if module is None:
            return None
        if module is _NOT_LOADED:
            return self._recorded_version() or self._version_after_import()
        text = self._loaded_version(module) or self._recorded_version() or self._owner_version()
        if text is None:
            self._refuse_unreadable(module)
        return text

    def _loaded_version(self, module: object) -> str | None:
        raw = getattr(module, "__version__", None)
        if raw is not self.loaded[0]:
            self.loaded = (raw, {})
        return _readable_text(raw)

    def _recorded_version(self) -> str | None:
        if self._recorded is not None:
            return self._recorded
        from importlib.metadata import PackageNotFoundError, version

        try:
            text = version(self.distribution)
        except (PackageNotFoundError, KeyError):
            return None
        return self._recording(self.distribution, text)

    def _owner_version(self) -> str | None:
        """Return the version of the distribution that installed a module of another name."""
        top_level = self.module.partition(".")[0]
        if self.distribution != self.module or top_level in sys.stdlib_module_names:
            return None
        owners = owners_of(self.module)
        if len(set(owners.values())) != 1:
            return None  # none, or several that disagree
        return self._recording(*owners.popitem())

    def _recording(self, distribution: str, text: str | None) -> str | None:
        if text is None:  # metadata without a Version field. Later Pythons raise KeyError
            return None
        try:
            _versions[text] = _parse(text)
        except InvalidVersion as error:
            raise InvalidVersion(
                f"the metadata of {distribution} has the version {text!r}, which is not a version"
            ) from error
        self._recorded = text
        return text

    def _version_after_import(self) -> str | None:
        import importlib
        from importlib.util import find_spec

        try:
            if find_spec(self.module.partition(".")[0]) is None:
                return None
            text = self._owner_version()
            if text is not None or find_spec(self.module) is None:
                return text
            module = importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            import logging

            logging.getLogger("mcore.versioning").debug(
                "%s is treated as absent: importing it failed with %r", self.module, error
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
                f"distribution {self.distribution} has no metadata with a version"
            )


_packages: dict[tuple[str, str], InstalledPackage] = {}


def known_package(module: str, distribution: str | None = None) -> InstalledPackage:
    """Return the shared object for a package. The distribution defaults to ``module``."""
    key = (module, distribution or module)
    return _packages.get(key) or _packages.setdefault(key, InstalledPackage(*key))


def installed_version(module: str, distribution: str | None = None) -> Version | None:
    """Return the version of a package, None if it is absent."""
    text = _installed_text(module, distribution)
    return None if text is None else _versions[text]


@constant_when_compiled
def _installed_text(module: str, distribution: str | None) -> str | None:
    return known_package(module, distribution).text()


def clear_version_cache() -> None:
    """Forget all found versions.

    Needed after an upgrade in a running process. It is not needed if a module is replaced in
    ``sys.modules``, also by None, or if ``__version__`` of a loaded module changes.

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
    """Return whether a version is at least, or without equality newer than, a requested version.

    For "newer" a local label such as ``+cpu`` is ignored, unless the request has a label too.
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


@lru_cache(maxsize=_LIMIT)
def _parse(version: str) -> Version:
    return Version(version)


def _readable_text(raw: object) -> str | None:
    """Return the text of a ``__version__``: a ``str``, a subclass of it or a Version."""
    if not isinstance(raw, (str, Version)):
        return None
    text = str(raw)
    try:
        _versions[text] = _parse(text)
    except InvalidVersion:
        return None
    return text
