"""A file with one JSON object per line: results that an interruption does not lose."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class JournalError(ValueError):
    """A journal has an unreadable line."""


def read_journal(
    path: Path, parse: Callable[[Any], T], on_broken: Callable[[str], object] | None = None
) -> Iterator[T]:
    """Parse each line of a file that need not exist.

    Raises:
        JournalError: a line is unreadable, unless ``on_broken`` accepts the message.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            result = parse(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = f"{path}, line {number} is no result: {error}"
            if on_broken is None:
                raise JournalError(f"{message}. Correct the file or name another one") from error
            on_broken(message)
        else:
            yield result


def append_line(path: Path, data: Mapping[str, Any]) -> None:
    """Append an object on a new line, even if the last line was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(json.dumps(data).encode() + b"\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
