"""What the host waits for and what it launches, each with the line of our source."""

import contextlib
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

_REPOSITORY = Path(__file__).parents[2]
_STANDARD_LIBRARY = Path(contextlib.__file__).parent
_HARNESS = (Path(__file__).parent, _REPOSITORY / "tools" / "rank_testing")


class HostWaitError(AssertionError):
    """The host waited for the device inside ``no_host_waits()``."""


class TooManyLaunchesError(AssertionError):
    """A block started more device work than ``launches()`` permits."""


@dataclass(eq=False)
class Record:
    """Numbers of launches, allocations and host waits in a block, by name and source line."""

    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    allocations: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    may_wait: bool = True


_records: list[Record] = []
captures: list[Any] = []  # the graph that is being captured


@contextmanager
def recorded(*, may_wait: bool = True) -> Iterator[Record]:
    """Record the device work of a block."""
    record = Record(may_wait=may_wait)
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


@contextmanager
def launches(*, at_most: int, allocations: float = math.inf) -> Iterator[Record]:
    """Check that a block starts at most so many device ops, and allocates at most so often.

    On a GPU nothing is counted.
    """
    with recorded() as record:
        yield record
    if record.ops.total() > at_most or record.allocations.total() > allocations:
        counts = (record.ops + record.allocations).most_common()
        rows = [f"{number:6d} x {what} at {line}" for (what, line), number in counts]
        title = f"more than {at_most} device ops or {allocations} allocations:"
        raise TooManyLaunchesError("\n".join([title, *rows]))


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Raise HostWaitError at the first wait of the host in a block, even if it is swallowed.

    On a GPU torch raises RuntimeError for copies, ``item`` and ``nonzero``.
    """
    set_mode: Any = torch.cuda.set_sync_debug_mode if torch.cuda.is_available() else id
    set_mode("error")
    try:
        with recorded(may_wait=False) as record:
            yield
    finally:
        set_mode("default")
    for what, line in record.waits:
        raise HostWaitError(f"the host waits for the device ({what}) at {line}")


def note(kind: str, what: str) -> None:
    """Record one of the ``ops``, ``allocations`` or ``waits``, or raise HostWaitError."""
    if kind == "waits":
        refuse_in_capture(what)
    if _records:
        line = find_line()
        for record in _records:
            getattr(record, kind)[what, line] += 1
        if kind == "waits" and not all(record.may_wait for record in _records):
            raise HostWaitError(f"the host waits for the device ({what}) at {line}")


def refuse_in_capture(what: str) -> None:
    """Raise as CUDA does for an operation that cannot be captured."""
    if captures:
        problem = "CUDA error: operation not permitted when stream is capturing"
        raise RuntimeError(f"{problem} ({what} at {find_line()})")


def find_line() -> str:
    """Return the innermost line of the packages or tools, else of the test, that is running."""
    outer, frame = "", cast("Any", sys._getframe(1))
    while frame:  # the number of a line is computed when it is read
        name = _name_file(frame.f_code.co_filename)
        is_ours = name.startswith(("packages/", "tools/")) and "/tests/" not in name
        if is_ours or (name and not outer):
            outer = f"{name}:{frame.f_lineno}"
        frame = None if is_ours else frame.f_back
    return outer or "backward (a thread of autograd)"


@functools.cache
def _name_file(file: str) -> str:
    """Return a file's name in the repository, or none for torch, Python and this tool."""
    path = Path(file)
    inside = file.partition("site-packages/")[2]
    if inside.startswith("mcore/"):  # a package installed from its wheel
        return f"packages/{inside}"
    is_library = "site-packages" in path.parts or path.is_relative_to(_STANDARD_LIBRARY)
    if file.startswith("<") or is_library or path.parent in _HARNESS:
        return ""
    return str(path.relative_to(_REPOSITORY)) if path.is_relative_to(_REPOSITORY) else file
