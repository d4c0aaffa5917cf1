"""Python files: found below folders, read, and replaced in one step."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import libcst as cst

from .findings import Note
from .rewrite import LayoutError, Rewritten, rewrite
from .scan import Look, find_package, scan
from .table import Table

_SKIPPED = ("__pycache__", "node_modules", "site-packages", "build", "dist")
_NOTEBOOK = ".ipynb"
_TAKEN = (".py", ".pyi", _NOTEBOOK)


@dataclass(frozen=True)
class Result:
    """The result of reading a file.

    Attributes:
        path: The file.
        before: Its bytes.
        after: The rewritten source, or None if the file cannot be read or written.
        error: The reason.
    """

    path: Path
    before: bytes
    after: Rewritten | None
    error: str = ""

    @property
    def differs(self) -> bool:
        """Whether anything is rewritten."""
        return self.after is not None and self.after.source != self.before

    @property
    def notes(self) -> list[Note]:
        """The places that a person has to check."""
        return [] if self.after is None else self.after.notes


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The named files and the Python files of named folders, each once and in order."""
    seen = set()
    for path in paths:
        for file in sorted(_walk_files(path)) if path.is_dir() else [path]:
            place = os.path.realpath(file)
            if place not in seen:
                seen.add(place)
                yield file


def _walk_files(folder: Path) -> Iterator[Path]:
    """The files below a folder, and links to files in it."""
    top = os.path.realpath(folder)
    for root, folders, files in os.walk(folder):
        folders[:] = [
            one
            for one in folders
            if one not in _SKIPPED
            and not one.startswith(".")
            and not (Path(root, one) / "pyvenv.cfg").exists()
        ]
        for file in (Path(root, one) for one in files if one.endswith(_TAKEN)):
            if os.path.isfile(file) and Path(os.path.realpath(file)).is_relative_to(top):
                yield file


def look_at(file: Path, table: Table) -> Look:
    """Look at a file. A notebook, or one that cannot be read, is for :func:`read`."""
    try:
        source = b"" if file.suffix == _NOTEBOOK else file.read_bytes()
    except OSError:
        source = b""
    return scan(source, table, find_package(file)) if source else Look(has_module=True)


def read(file: Path, table: Table) -> Result | None:
    """Rewrite the source of a file, without writing it. None for a notebook without old names."""
    try:
        source = file.read_bytes()
    except OSError as error:
        return Result(file, b"", None, f"can't be read: {error.strerror}")
    if file.suffix == _NOTEBOOK:
        return _describe_notebook(file, source, table)
    try:
        return Result(file, source, rewrite(source, table, find_package(file)))
    except LayoutError as error:
        return Result(file, source, None, f"is left: {error}")
    except (cst.ParserSyntaxError, UnicodeError, SyntaxError, RecursionError) as error:
        first = " ".join(str(error).split()[:16])
        return Result(file, source, None, f"is not Python that can be read: {first}")


def _describe_notebook(file: Path, source: bytes, table: Table) -> Result | None:
    """The note about a notebook, which is not rewritten."""
    for line, text in enumerate(source.decode(errors="replace").split("\n"), 1):
        for module in sorted(table.modules):
            if module in text:
                advice = "notebooks are not rewritten: change its cells yourself"
                note = Note(line, module, advice, is_left=True)
                return Result(file, source, Rewritten(source, notes=[note]))
    return None


def written(result: Result) -> Result:
    """Replace the file in one step, keeping its permissions and owner."""
    if result.after is None or not result.differs:
        return result
    place = Path(os.path.realpath(result.path))
    try:
        status = place.stat()
        if not status.st_mode & 0o222 or not os.access(place, os.W_OK):
            return replace(result, after=None, error="can't be written: it is read-only")
        if place.read_bytes() != result.before:
            return replace(result, after=None, error="is left: it has changed since it was read")
        _replace_file(result.after.source, place, status)
    except OSError as error:
        return replace(result, after=None, error=f"can't be written: {error.strerror}")
    return replace(result, after=result.after.placed())


def _replace_file(source: bytes, place: Path, status: os.stat_result) -> None:
    descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:99]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(source)
        with suppress(OSError, AttributeError):  # without the right to change the owner
            os.chown(name, status.st_uid, status.st_gid)
        os.chmod(name, stat.S_IMODE(status.st_mode))
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise
