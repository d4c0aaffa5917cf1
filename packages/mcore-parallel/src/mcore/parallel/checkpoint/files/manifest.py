"""The manifest: all that a load has to know, written last and read first, by one rank for all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.checksums import DIGITS, checksum_of, sums_of
from mcore.parallel.checkpoint.files.index import Index, PackedKeys, Piece, StoredKey
from mcore.parallel.checkpoint.files.metadata_file import PICKLE_START, is_plain_name, stock_index
from mcore.parallel.checkpoint.files.regular_files import (
    Place,
    read_regular,
    size_problems,
)
from mcore.parallel.checkpoint.files.remote import RemotePath
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.torch_compat import METADATA_FILE

MANIFEST_FILE = "manifest.json"
_START = b'{"format": "mcore sharded checkpoint", "version": '
_HEADER = _START + b'3, "content": [\n'
_END = b'], "checksum": "'
_AFTER = b'"}\n'
_VERSION = re.compile(rb"\d*")
_ROWS = 4096  # a line's numbers become objects, so a line holds a limited number


class FileRecord(NamedTuple):
    """A file of a checkpoint: its size in bytes, and the pieces in it, in their order."""

    size: int
    pieces: Sequence[tuple[str, Piece]]  # after their keys


class RawIndex(NamedTuple):
    """What one rank reads and shares: manifest and, where that does not say all, torch's index."""

    manifest: bytes
    metadata: bytes


def read_raw_index(directory: Place) -> RawIndex:
    """Read the files that say what a checkpoint holds; empty bytes where one is not needed."""
    manifest, metadata = directory / MANIFEST_FILE, directory / METADATA_FILE
    if not _has_name(manifest):
        if not _has_name(metadata):
            raise CheckpointingException(_no_checkpoint(directory))
        return RawIndex(b"", read_regular(metadata, PICKLE_START))
    raw = read_regular(manifest, _START)
    is_alone = not raw.startswith(_START + b"2,")
    return RawIndex(raw, b"" if is_alone else read_regular(metadata, PICKLE_START))


def parsed_index(directory: Place, raw: RawIndex) -> Index:
    """Return what :func:`read_raw_index` read, checked; no code of it is run."""
    if not raw.manifest:
        index, is_ours = stock_index(directory, raw.metadata)
        if is_ours:
            raise CheckpointingException(
                f"{directory / MANIFEST_FILE} is missing, without which nothing of this checkpoint "
                "can be checked; take another checkpoint"
            )
        return index
    path = directory / MANIFEST_FILE
    version = _VERSION.match(raw.manifest, len(_START))
    if version is None or version[0] not in (b"2", b"3"):
        raise CheckpointingException(
            f"{path} is of another version than 2 or 3: another version of mcore-parallel wrote "
            "it, or it has changed"
        )
    try:
        if version[0] == b"2":
            return _version_2(directory, raw)
        return _version_3(raw.manifest)
    except CheckpointingException:
        raise
    except (_ChangedError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointingException(
            f"{path} has changed since it was saved; take another checkpoint"
        ) from error
    except Exception as error:  # whatever the parser makes of what somebody wrote on purpose
        raise CheckpointingException(
            f"{path} contradicts itself ({type(error).__name__}: {error}); take another checkpoint"
        ) from error


def read_index(directory: Place) -> Index:
    """Return what a checkpoint holds, as one process."""
    return parsed_index(directory, read_raw_index(directory))


def file_problems(directory: Place, index: Index) -> Iterator[tuple[str, str]]:
    """Yield the files that are missing or have another size, and what is wrong."""
    return size_problems(directory, index.files, at_least=not index.checksums)


class _ChangedError(Exception):
    """The checksum at the end of a manifest is not that of its content."""


def _has_name(path: Place) -> bool:
    """Return whether there is something of a name, be it a link to nothing."""
    try:
        return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)
    except OSError as error:
        raise CheckpointingException(f"{path} cannot be read ({error.strerror})") from error


def _no_checkpoint(directory: Place) -> str:
    if not directory.exists():
        return f"{directory} does not exist; list_checkpoints(...) lists those of a run"
    if not directory.is_dir():
        return f"{directory} cannot be read: it is not a directory"
    return f"{directory} is not a checkpoint: it has no file {MANIFEST_FILE} or {METADATA_FILE}"


def manifest_of(
    keys: Mapping[str, tuple[str, Shape]],
    files: Mapping[str, FileRecord],
    whole_files: Mapping[str, tuple[int, str]],
) -> bytes:
    """Return the manifest of some files.

    ``keys`` has dtype, empty for an object, and global shape; ``whole_files`` size and checksum.
    """
    lines = [json.dumps(line).encode() for line in _lines(keys, files, whole_files)]
    content = _HEADER + b",\n".join(lines) + b"\n"
    return content + _END + checksum_of(content).encode() + _AFTER


def _lines(
    keys: Mapping[str, tuple[str, Shape]],
    files: Mapping[str, FileRecord],
    whole_files: Mapping[str, tuple[int, str]],
) -> Iterator[dict[str, Any]]:
    sizes = {name: (record.size, "") for name, record in files.items()}
    yield {"files": dict(sorted({**sizes, **whole_files}.items()))}
    names = sorted(keys)
    for rows in _batches(names):
        yield {
            "keys": rows,
            "dtypes": [keys[name][0] for name in rows],
            "axes": [len(keys[name][1]) for name in rows],
            "shapes": [size for name in rows for size in keys[name][1]],
        }
    numbers = {name: number for number, name in enumerate(names)}
    for file, record in sorted(files.items()):
        for named in _batches(record.pieces):
            pieces = [piece for _, piece in named]
            yield {
                "file": file,
                "at": pieces[0].at,
                "keys": [numbers[key] for key, _ in named],
                "lengths": [piece.length for piece in pieces],
                "elements": [-1 if one.elements is None else one.elements for one in pieces],
                "checksums": "".join(piece.checksum for piece in pieces),
                "boxes": [n for piece in pieces for n in (*piece.start, *piece.shape)],
            }


def _batches(rows: Sequence[Any]) -> Iterator[list[Any]]:
    left = iter(rows)
    while batch := list(islice(left, _ROWS)):
        yield batch


def _version_3(raw: bytes) -> Index:
    end = len(raw) - len(_END) - DIGITS - len(_AFTER)
    closing = _END + checksum_of(memoryview(raw)[: max(end, 0)]).encode() + _AFTER
    if not raw.startswith(_HEADER) or not raw.endswith(closing):
        raise _ChangedError
    lines = _json_lines(raw, len(_HEADER), end)
    files: dict[str, tuple[int, str]] = {
        name: (size, checksum) for name, (size, checksum) in next(lines)["files"].items()
    }
    if not all(is_plain_name(name) and type(size) is int for name, (size, _) in files.items()):
        raise ValueError("a file has no plain name or no size")
    packed = PackedKeys({name: size for name, (size, checksum) in files.items() if not checksum})
    for line in lines:
        (packed.add_pieces if "file" in line else packed.add_keys)(*line.values())
    packed.finish()
    return Index(
        packed,
        {name: size for name, (size, _) in files.items()},
        "xxh3",
        {name: checksum for name, (_, checksum) in files.items() if checksum},
    )


def _json_lines(raw: bytes, position: int, end: int) -> Iterator[Any]:
    """Parse line by line: the objects of all lines at once would take ten times the memory."""
    while position < end:
        next_line = raw.index(b"\n", position) + 1
        yield json.loads(raw[position:next_line].rstrip(b",\n"))
        position = next_line


def _version_2(directory: Place, raw: RawIndex) -> Index:
    """Read a manifest that lists only pieces, and torch's index, which says what they are."""
    content = json.loads(raw.manifest)
    checksum = content.pop("checksum")
    checked = {**content, "checksum": sums_of(json.dumps(content).encode())}
    if checksum != checked["checksum"] or (json.dumps(checked) + "\n").encode() != raw.manifest:
        raise _ChangedError
    sizes = {name: entry["bytes"] for name, entry in content["files"].items()}
    parts = {
        (name, part[0]): part for name, entry in content["files"].items() for part in entry["parts"]
    }
    if not all(is_plain_name(name) for name in sizes):
        raise ValueError("a file has no plain name")
    if parts[METADATA_FILE, 0][2] != sums_of(raw.metadata):
        raise CheckpointingException(
            f"{directory / METADATA_FILE} has changed since it was saved, or the manifest is that "
            "of another checkpoint; take another checkpoint"
        )
    stock, _ = stock_index(directory, raw.metadata)
    keys = {
        name: StoredKey(
            stored.dtype,
            stored.shape,
            tuple(_with_part(piece, parts[piece.file, piece.at]) for piece in stored.pieces),
        )
        for name, stored in stock.keys.items()
    }
    return Index(keys, sizes, "sums")


def _with_part(piece: Piece, part: Sequence[Any]) -> Piece:
    at, span, checksum, elements_at = part
    if span < piece.length:
        raise ValueError(f"the piece at {at} of {piece.file} is longer than the manifest says")
    elements = None if elements_at is None else elements_at - at
    return piece._replace(span=span, checksum=checksum, elements=elements)
