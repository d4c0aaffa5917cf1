"""The installed distributions, read from their metadata folders on the import path.

Faster than ``importlib.metadata``, whose import alone takes longer than reading 200 records.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

_SUFFIXES = (".dist-info", ".egg-info")
_SEPARATORS = re.compile(r"[-_.]+")


def recorded_version(name: str) -> str | None:
    """Return the version of a distribution, None if it is absent or its metadata has none."""
    folder = _folder_named(name)
    return None if folder is None else _field(folder, b"Version")


def owners_of(module: str) -> dict[str, str | None]:
    """Return the distributions that installed a module, by name, with their versions.

    The distribution of the module's name is read first. If it installed the module's first file,
    no other is read.
    """
    named = _folder_named(module.partition(".")[0])
    if named is not None and _brought_first_file(named, module):
        folders = [named]
    else:
        folders = [folder for folder in _metadata_folders() if _brought(folder, module)]
    owners: dict[str, str | None] = {}
    for folder in folders:
        owners.setdefault(_field(folder, b"Name") or "", _field(folder, b"Version"))
    return owners


def _metadata_folders() -> Iterator[str]:
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except (OSError, TypeError):
            continue  # not a folder, or gone
        yield from (os.path.join(place, name) for name in names if name.endswith(_SUFFIXES))


def _folder_named(distribution: str) -> str | None:
    wanted = _normalised(distribution)
    folders = _metadata_folders()
    return next((folder for folder in folders if _name_of(folder) == wanted), None)


def _name_of(folder: str) -> str:
    return _normalised(os.path.splitext(os.path.basename(folder))[0].partition("-")[0])


def _normalised(name: str) -> str:
    return _SEPARATORS.sub("-", name).lower()


def _field(folder: str, name: bytes) -> str | None:
    """Return a field of the metadata file, whose name depends on the kind of folder."""
    text = _read(folder, "METADATA") or _read(folder, "PKG-INFO")
    found = re.search(rb"^%s:[ \t]*(\S.*?)\s*$" % name, text.partition(b"\n\n")[0], re.M)
    return None if found is None else found[1].decode("utf-8", "replace")


def _brought(folder: str, module: str) -> bool:
    record = _read(folder, "RECORD")
    if _records(record, module, rb"(/.*|\.[^/\n]*)?"):
        return True
    # An editable installation, or an installation by an old tool, lists packages but not files.
    if record and b"__editable__" not in record:
        return False
    return module.encode() in _read(folder, "top_level.txt").split()


def _brought_first_file(folder: str, module: str) -> bool:
    return _records(_read(folder, "RECORD"), module, rb"(/__init__)?(\.[^/\n]*)?")


def _records(record: bytes, module: str, rest_of_path: bytes) -> bool:
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
