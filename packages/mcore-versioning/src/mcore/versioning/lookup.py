"""The version of an installed package, found without importing it if that can be avoided."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

F = TypeVar("F", bound="Callable[..., Any]")

_NOT_LOADED = object()
_LIMIT = 256
# Errors of incomplete, mismatched or GPU-only installations, and of finders.
_FAILURES_OF_IMPORTS = (
    *(ImportError, OSError, RuntimeError, SyntaxError, SystemExit),
    *(AssertionError, AttributeError, LookupError, TypeError, ValueError),
)

# Versions of installed packages, by their texts. A dict, since torch.compile can read it.
versions_by_text: dict[str, Version] = {}
_SUFFIXES = (".dist-info", ".egg-info")
_SEPARATORS = re.compile(r"[-_.]+")


def constant_when_compiled(func: F) -> F:
    """Let torch call a function while it compiles, and treat the result as a constant.

    The same as ``torch.compiler.assume_constant_result``.
    """
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


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
        return None if text is None else versions_by_text[text]

    def is_at_least(
        self, version: str | Version, check_equality: bool = True, release_only: bool = False
    ) -> bool:
        """Return whether the package is installed in at least this version."""
        wanted = parse_version(version)  # an invalid request is an error for an absent package too
        installed = self.text()
        if installed is None:
            return False
        found = versions_by_text[installed]
        answer = is_at_least(found, wanted, check_equality, release_only=release_only)
        raw, answers = self.loaded
        if check_equality and not release_only and installed == read_version_text(raw):
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
            return self._read_recorded_version() or self._import_for_version()
        text = (
            self._read_loaded_version(module)
            or self._read_recorded_version()
            or self._read_owner_version()
        )
        if text is None:
            self._refuse_unreadable(module)
        return text

    def _read_loaded_version(self, module: object) -> str | None:
        raw = getattr(module, "__version__", None)
        if raw is not self.loaded[0]:
            self.loaded = (raw, {})
        return read_version_text(raw)

    def _read_recorded_version(self) -> str | None:
        if self._recorded is not None:
            return self._recorded
        from importlib.metadata import PackageNotFoundError, version

        try:
            text: str | None = version(self.distribution)
        except PackageNotFoundError:
            return None
        except (KeyError, TypeError, ValueError):
            text = None  # no name, an entry of sys.path that is no path, not UTF-8
        return self._record_version(self.distribution, text or recorded_version(self.distribution))

    def _read_owner_version(self) -> str | None:
        """Return the version of the distribution that installed a module of another name."""
        top_level = self.module.partition(".")[0]
        if self.distribution != self.module or top_level in sys.stdlib_module_names:
            return None
        owners = owners_of(self.module)
        if len(set(owners.values())) != 1:
            return None  # none, or several that disagree
        return self._record_version(*owners.popitem())

    def _record_version(self, distribution: str, text: str | None) -> str | None:
        if text is None:  # metadata without a Version field. Later Pythons raise KeyError
            return None
        try:
            versions_by_text[text] = _parse(text)
        except InvalidVersion as error:
            raise InvalidVersion(
                f"the metadata of {distribution} has the version {text!r}, which is not a version"
            ) from error
        self._recorded = text
        return text

    def _import_for_version(self) -> str | None:
        import importlib
        from importlib.util import find_spec

        try:
            if find_spec(self.module.partition(".")[0]) is None:
                return None
            text = self._read_owner_version()
            if text is not None or find_spec(self.module) is None:
                return text
            importlib.import_module(self.module)
        except InvalidVersion:
            raise
        except _FAILURES_OF_IMPORTS as error:
            import logging

            logging.getLogger("mcore.versioning").debug(
                "%s is treated as absent: importing it failed with %r", self.module, error
            )
            return None
        return self.text()

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


@constant_when_compiled
def find_version_text(module: str, distribution: str | None) -> str | None:
    """Return the text of a package's version, None if it is absent."""
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
        post = "" if installed.post is None else f".post{installed.post}"
        installed = Version(installed.base_version + post)
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


def read_version_text(raw: object) -> str | None:
    """Return the text of a ``__version__``: a ``str``, a subclass of it or a Version."""
    if not isinstance(raw, (str, Version)):
        return None
    text = str(raw)
    try:
        versions_by_text[text] = _parse(text)
    except InvalidVersion:
        return None
    return text


# Metadata folders are read here, since the import of importlib.metadata alone takes longer than
# reading 200 records.
def recorded_version(name: str) -> str | None:
    """Return the version of a distribution, None if it is absent or its metadata has none."""
    folder = _find_folder(name)
    return None if folder is None else _field(folder, b"Version")


def owners_of(module: str) -> dict[str, str | None]:
    """Return the distributions that installed a module, by name, with their versions.

    The distribution of the module's name is read first. If it installed the module's first file,
    no other is read.
    """
    named = _find_folder(module.partition(".")[0])
    first_file = rb"(/__init__)?(\.[^/\n]*)?"
    if named is not None and _has_record(_read(named, "RECORD"), module, first_file):
        folders = [named]
    else:
        folders = [
            folder for folder in _iterate_metadata_folders() if _has_installed(folder, module)
        ]
    owners: dict[str, str | None] = {}
    for folder in folders:
        owners.setdefault(_field(folder, b"Name") or "", _field(folder, b"Version"))
    return owners


def _iterate_metadata_folders() -> Iterator[str]:
    for place in sys.path:
        try:
            place = os.fsdecode(place)
            names = os.listdir(place or ".")
        except (OSError, TypeError):
            continue  # not a folder, or gone
        yield from (os.path.join(place, name) for name in names if name.endswith(_SUFFIXES))


def _find_folder(distribution: str) -> str | None:
    wanted = _normalize(distribution)
    # A folder is called NAME-VERSION.dist-info or NAME.egg-info.
    for folder in _iterate_metadata_folders():
        name = os.path.splitext(os.path.basename(folder))[0].partition("-")[0]
        if _normalize(name) == wanted:
            return folder
    return None


def _normalize(name: str) -> str:
    return _SEPARATORS.sub("-", name).lower()


def _field(folder: str, name: bytes) -> str | None:
    """Return a field of the metadata file, whose name depends on the kind of folder."""
    text = _read(folder, "METADATA") or _read(folder, "PKG-INFO")
    found = re.search(rb"^%s:[ \t]*(\S.*?)\s*$" % name, text.partition(b"\n\n")[0], re.M)
    return None if found is None else found[1].decode("utf-8", "replace")


def _has_installed(folder: str, module: str) -> bool:
    record = _read(folder, "RECORD")
    if _has_record(record, module, rb"(/.*|\.[^/\n]*)?"):
        return True
    # An editable installation, or an installation by an old tool, lists packages but not files.
    if record and b"__editable__" not in record:
        return False
    return module.encode() in _read(folder, "top_level.txt").split()


def _has_record(record: bytes, module: str, rest_of_path: bytes) -> bool:
    path = module.replace(".", "/").encode()
    # A search for the bytes first avoids the slower pattern for most records.
    if not (record.startswith(path) or b"\n" + path in record or b'"' + path in record):
        return False
    pattern = rb'^"?%s%s\.(py|so|pyd)"?,' % (re.escape(path), rest_of_path)
    return re.search(pattern, record, re.M) is not None


def _read(folder: str, name: str) -> bytes:
    try:
        with open(os.path.join(folder, name), "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""
