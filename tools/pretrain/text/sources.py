"""The files of ``--data``, and their text piece by piece."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pretrain.usage import UsageError

_PIECE_BYTES = 1 << 20


def find_sources(data: str) -> list[Path]:
    """The files of ``--data`` in sorted order. Hidden files of a folder are skipped."""
    path = Path(data)
    if path.is_dir():
        inside = {one: one.relative_to(path).parts for one in path.rglob("*")}
        found = [one for one in inside if not any(part[0] == "." for part in inside[one])]
    elif path.exists():
        if not path.is_file():
            raise UsageError(f"--data {data}: {path} is not a regular file")
        found = [path]
    else:
        found = [Path(name) for name in glob.glob(data, recursive=True)]
    files = sorted(one for one in found if one.is_file())
    if not files:
        raise UsageError(f"--data {data}: no file matches")
    return files


def read_pieces(path: Path, field: str) -> Iterator[tuple[bytes, int]]:
    """Pieces of a file, each with the number of bytes it covers. Raises UsageError.

    A piece is about 1 MiB and ends with a line break. In a ``.jsonl`` file a piece is the text of
    one record and a line break.
    """
    try:
        with path.open("rb") as file:
            yield from _read_records(file, path, field) if is_jsonl(path) else _read_lines(file)
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from None


def is_jsonl(path: Path) -> bool:
    """Whether each line of a file is a document."""
    return path.suffix == ".jsonl"


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
    except ValueError as error:
        raise UsageError(f"{place} is not JSON ({error})") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UsageError(f"{place} has no text in a field {field!r}: pass its key with --field")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place}: its text is not Unicode ({error})") from None
