"""The files of ``--data``, and their text piece by piece."""

from __future__ import annotations

import functools
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from pretrain.run_folder import LOCK_NAME
from pretrain.usage import UsageError

_PIECE_BYTES = 1 << 20
_MOST_NAMES = 200_000
_NO_TEXT = (".zst", ".bz2", ".xz", ".lz4", ".7z", ".zip", ".tar", ".tgz", ".parquet", ".arrow")
_CACHED = re.compile(r"[0-9a-f]{24}\.(bin|borders|json)(\..*\.partial)?$")


def find_sources(data: str) -> list[Path]:
    """The files of ``--data`` in sorted order.

    Hidden files of a folder, runs and token caches are skipped.
    """
    path = Path(data)
    if path.exists() and not path.is_dir():
        if not path.is_file():
            raise UsageError(f"--data {data}: {path} is not a regular file")
        return [path]
    names = path.rglob("*") if path.is_dir() else map(Path, glob.iglob(data, recursive=True))
    try:
        found = list(islice(names, _MOST_NAMES))
    except OSError as error:
        raise UsageError(f"--data {data}: {error.filename}: {error.strerror}") from None
    if len(found) == _MOST_NAMES:  # / or /proc/**, of a run folder from somebody else
        raise UsageError(f"--data {data}: {_MOST_NAMES:,} files or more. Join texts in .jsonl")
    if path.is_dir():
        hidden = re.compile(r"(^|/)\.")
        found = [one for one in found if not hidden.search(one.relative_to(path).as_posix())]
    is_run = functools.cache(lambda folder: (folder / LOCK_NAME).exists())
    files = [
        one
        for one in sorted(found)
        if one.is_file() and not _CACHED.match(one.name) and not any(map(is_run, one.parents))
    ]
    if not files:
        raise UsageError(f"--data {data}: no file matches, without the runs and caches of this job")
    return files


def read_pieces(path: Path, field: str) -> Iterator[tuple[bytes, int]]:
    """Pieces of a file, each with the number of bytes it covers. Raises UsageError.

    A piece is about 1 MiB and ends with a line break. In a ``.jsonl`` file a piece is the text of
    one record and a line break.
    """
    try:
        with _open(path) as file:
            yield from _read_records(file, path, field) if is_jsonl(path) else _read_lines(file)
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise UsageError(f"--data: cannot read {path}: {problem}") from None


def is_jsonl(path: Path) -> bool:
    """Whether each line of a file is a document."""
    return path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def _open(path: Path) -> IO[bytes]:
    """Open a file, decompressed if its name ends with .gz."""
    name = path.name.lower()
    if name.removesuffix(".gz").endswith(_NO_TEXT):
        raise UsageError(
            f"--data: {path} is compressed or no text: pass text or .jsonl files, plain or with .gz"
        )
    return gzip.open(path) if name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _read_lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    while block := file.read(_PIECE_BYTES):
        piece = block + file.readline()
        yield piece, len(piece)


def _read_records(file: IO[bytes], path: Path, field: str) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield _extract_text(line, f"--data: {path}, line {number}", field) + b"\n", len(line)


def _extract_text(line: bytes, place: str, field: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON ({error})") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UsageError(f"{place} has no text in a field {field!r}: pass its key with --field")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place}: its text is not Unicode ({error})") from None
