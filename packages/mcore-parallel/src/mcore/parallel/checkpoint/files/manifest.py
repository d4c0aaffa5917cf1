"""The manifest: a checkpoint's files, sizes and checksums, written last and checked first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.checksums import checksum_of_bytes
from mcore.parallel.checkpoint.files.durable_files import write_file

MANIFEST_FILE = "manifest.json"
_FORMAT = "mcore sharded checkpoint"
_VERSION = 2


class Piece(NamedTuple):
    """Bytes of a file that are checked together: the content of a key, and zeros up to the next."""

    offset: int
    length: int
    checksum: str
    elements_at: int | None = None  # where in the file the elements of a tensor start, row-major


class FileRecord(NamedTuple):
    """A file of a checkpoint: its size in bytes, and everything in it."""

    size: int
    pieces: tuple[Piece, ...]


FileRecords = Mapping[str, FileRecord]


def whole_file(content: bytes) -> FileRecord:
    """Describe a file of one piece by its content."""
    return FileRecord(len(content), (Piece(0, len(content), checksum_of_bytes(content)),))


def write_manifest(directory: Path, files: FileRecords) -> None:
    """Write the manifest of a directory durably, while its name is still an incomplete one."""
    write_file(directory / MANIFEST_FILE, _rendered(files))


def _rendered(files: FileRecords) -> bytes:
    """Render a manifest the only way it can be written, with its own checksum at the end."""
    listed = {
        name: {"bytes": record.size, "parts": record.pieces}
        for name, record in sorted(files.items())
    }
    content = {"format": _FORMAT, "version": _VERSION, "files": listed}
    content["checksum"] = checksum_of_bytes(json.dumps(content).encode())
    return (json.dumps(content) + "\n").encode()


def read_manifest(directory: Path) -> FileRecords | None:
    """Read the list of a checkpoint's files; None where there is none, as in torch's own."""
    path = directory / MANIFEST_FILE
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointingException(
            f"{path} cannot be read ({error}); take another checkpoint"
        ) from error
    files = _files(path, content)
    if _rendered(files) != raw:
        raise CheckpointingException(
            f"{path} has changed since it was saved; take another checkpoint"
        )
    return files


def _files(path: Path, content: Any) -> FileRecords:
    known = isinstance(content, dict) and content.get("format") == _FORMAT
    if not known or content.get("version") != _VERSION:
        raise CheckpointingException(
            f"{path} is not the manifest of {_FORMAT!r} version {_VERSION}; the directory is "
            "something else, has changed, or another version of mcore-parallel wrote it"
        )
    try:
        return {name: _record(entry) for name, entry in content["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointingException(f"{path} lists no files; take another checkpoint") from error


def _record(entry: Mapping[str, Any]) -> FileRecord:
    pieces: Sequence[Any] = entry["parts"]
    return FileRecord(entry["bytes"], tuple(Piece(*piece) for piece in pieces))


def size_problem(path: Path, expected: int, *, at_least: bool = False) -> str | None:
    """Return what is wrong with a file's size, with the file's name, or None."""
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found == expected or (at_least and found > expected):
        return None
    return f"{path} has {found} bytes but {expected} were saved: it is truncated or was changed"
