"""Standard output and error that never fail: unwritable text is dropped."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any

_NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}


def open_console() -> None:
    """Make every print of this process succeed. One warning reports lost output.

    This covers tqdm's bar and the logs of libraries too. Lines are written whole. A closed standard
    file is replaced by the null device, since the next opened file would get its number.
    """
    for name, number in _NUMBERS.items():
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115  # open until the process ends
        elif number and type(stream) is io.TextIOWrapper and _is_on(stream, number):
            setattr(sys, name, _wrap_stream(stream, number))


def _is_on(stream: io.TextIOWrapper, number: int) -> bool:
    """Whether the stream writes to that file directly, not through this module."""
    try:
        raw = getattr(stream.buffer, "raw", None)  # an unbuffered stream has none
        return stream.fileno() == number and not isinstance(raw, _UnfailingFile)
    except OSError:
        return False


def _wrap_stream(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    file = _UnfailingFile(number, _warn if number == 1 else _ignore)
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=errors, line_buffering=True
    )


class _UnfailingFile(io.FileIO):
    """A file that accepts everything. The first failed write is reported, its text is dropped."""

    def __init__(self, number: int, report: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._report: Callable[[OSError], None] = report

    def write(self, data: Any) -> int:
        """Write some bytes. Waits if another process made the file non-blocking."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError as error:
            report, self._report = self._report, _ignore
            report(error)
            return len(data)
        return written


def _warn(error: OSError) -> None:
    print(
        f"pretrain: warning: cannot write to standard output ({error.strerror}); training "
        "continues without it",
        file=sys.stderr,
    )


def _ignore(error: OSError) -> None:
    """Ignore the error: there is no place left to report it."""
