"""Standard output and errors, which a job outlives: what they do not take is left out."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any

_NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}


def open_console() -> None:
    """Let nothing that is printed in this process fail; one warning says that output is lost.

    Everything printed goes through here, tqdm's bar and what libraries log too. Lines are written
    whole. Files that are closed become the null device, or the next file would take their number.
    """
    for name, number in _NUMBERS.items():
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115  # for as long as we live
        elif number and type(stream) is io.TextIOWrapper and _is_on(stream, number):
            setattr(sys, name, _unfailing(stream, number))


def _is_on(stream: io.TextIOWrapper, number: int) -> bool:
    """Whether it writes to that file, and not through this module."""
    try:
        raw = getattr(stream.buffer, "raw", None)  # unbuffered ones have none
        return stream.fileno() == number and not isinstance(raw, _UnfailingFile)
    except OSError:
        return False


def _unfailing(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    file = _UnfailingFile(number, _warn if number == 1 else _say_nothing)
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=errors, line_buffering=True
    )


class _UnfailingFile(io.FileIO):
    """A file that takes everything: what cannot be written is told once and dropped."""

    def __init__(self, number: int, tell: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._tell: Callable[[OSError], None] = tell

    def write(self, data: Any) -> int:
        """Write some, and wait as for any file where another process made it non-blocking."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError as error:
            tell, self._tell = self._tell, _say_nothing
            tell(error)
            return len(data)
        return written


def _warn(error: OSError) -> None:
    print(
        f"pretrain: warning: standard output takes no more ({error.strerror}); training goes on "
        "without it",
        file=sys.stderr,
    )


def _say_nothing(error: OSError) -> None:
    """Leave it: there is nowhere to say it."""
