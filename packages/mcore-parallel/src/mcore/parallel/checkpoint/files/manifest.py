"""The list of a checkpoint's files, their sizes and checksums, written last and checked first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.checksums import checksum_of_bytes
from mcore.parallel.checkpoint.files.durable_files import write_file

__all__ = [
    "MANIFEST_FILE",
    "FileRecord",
    "FileRecords",
    "Part",
    "read_manifest",
    "size_problem",
    "whole_file",
    "write_manifest",
]

MANIFEST_FILE = "manifest.json"
_FORMAT = "mcore sharded checkpoint"
_VERSION = 2


@dataclass(frozen=True)
class Part:
    """Bytes of a file that are checked together: the content of a key, and zeros up to the next.

    Attributes:
        offset: Where they start.
        length: How many there are.
        checksum: Of these bytes.
        elements_at: Where in the file the elements of the tensor start that the part holds, in
            row-major order; None when it holds something else.
    """

    offset: int
    length: int
    checksum: str
    elements_at: int | None = None


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Attributes:
        size: In bytes.
        parts: Everything in it.
    """

    size: int
    parts: tuple[Part, ...]


FileRecords = Mapping[str, FileRecord]


def whole_file(content: bytes) -> FileRecord:
    """Describe a file of one part by its content."""
    return FileRecord(len(content), (Part(0, len(content), checksum_of_bytes(content)),))


def write_manifest(directory: Path, files: FileRecords) -> None:
    """Write the manifest of a directory durably.

    Args:
        directory: The checkpoint, still under its incomplete name.
        files: Its files by name.
    """
    write_file(directory / MANIFEST_FILE, _rendered(files))


def _rendered(files: FileRecords) -> bytes:
    """Write a manifest the one way it can be written, its own checksum at the end."""
    listed = {
        name: {
            "bytes": record.size,
            "parts": [[p.offset, p.length, p.checksum, p.elements_at] for p in record.parts],
        }
        for name, record in sorted(files.items())
    }
    content = {"format": _FORMAT, "version": _VERSION, "files": listed}
    content["checksum"] = checksum_of_bytes(json.dumps(content).encode())
    return (json.dumps(content) + "\n").encode()


def read_manifest(directory: Path) -> FileRecords | None:
    """Read the list of a checkpoint's files.

    Args:
        directory: The checkpoint.

    Returns:
        The files by name; None when there is no manifest, as in checkpoints that
        torch.distributed.checkpoint wrote by itself.

    Raises:
        CheckpointingException: The manifest cannot be read, is of another format, or has changed.
    """
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
    parts: Sequence[Any] = entry["parts"]
    return FileRecord(entry["bytes"], tuple(Part(*part) for part in parts))


def size_problem(path: Path, expected: int, *, at_least: bool = False) -> str | None:
    """Compare a file's size with what it must be.

    Args:
        path: The file.
        expected: Size in bytes.
        at_least: Whether a larger file is fine too.

    Returns:
        What is wrong, in words that name the file, or None when all is well.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found == expected or (at_least and found > expected):
        return None
    return f"{path} has {found} bytes but {expected} were saved: it is truncated or was changed"
