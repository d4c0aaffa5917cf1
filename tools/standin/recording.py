"""What the host waits for and what it launches, each with the line of our source."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_REPOSITORY = Path(__file__).parents[2]
_STANDARD_LIBRARY = Path(contextlib.__file__).parent
_HARNESS = (Path(__file__).parent, Path(__file__).parents[1] / "rank_testing")


class HostWaitError(AssertionError):
    """The host waited for the device inside ``no_host_waits()``."""


class TooManyLaunchesError(AssertionError):
    """A block started more device work than ``launches()`` permits."""


@dataclass
class Record:
    """Device work of a block.

    Attributes:
        ops: Number of launches of each op and source line.
        allocations: Number of allocations of each source line.
        waits: Host waits with their source lines, in order.
        copies: Copies between host and device that the host did not wait for.
    """

    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    allocations: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)

    def describe(self) -> str:
        """Return the launches as a table, the most frequent first."""
        rows = [f"  {n:4d} x {op} at {line}" for (op, line), n in self.ops.most_common()]
        rows += [f"  {n:4d} x allocation at {line}" for line, n in self.allocations.most_common()]
        return "\n".join(rows)


_records: list[Record] = []
captures: list[object] = []
_forbidden: list[list[HostWaitError]] = []


@contextmanager
def recorded() -> Iterator[Record]:
    """Record the device work of a block."""
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [r for r in _records if r is not record]


@contextmanager
def launches(*, at_most: int, allocations: int | None = None) -> Iterator[Record]:
    """Check that a block starts at most so many device ops, and allocates at most so often."""
    with recorded() as record:
        yield record
    num_ops, num_allocations = record.ops.total(), record.allocations.total()
    if num_ops > at_most or (allocations is not None and num_allocations > allocations):
        raise TooManyLaunchesError(
            f"{num_ops} device ops and {num_allocations} allocations, permitted are {at_most} and "
            f"{'any number' if allocations is None else allocations}:\n{record.describe()}"
        )


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Raise HostWaitError at the first wait of the host in a block, even if it is swallowed."""
    seen: list[HostWaitError] = []
    _forbidden.append(seen)
    try:
        yield
    finally:
        _forbidden[:] = [s for s in _forbidden if s is not seen]
    if seen:
        raise seen[0]


def note_op(name: str) -> None:
    """Record a launch."""
    if _records:
        line = find_line()
        for record in _records:
            record.ops[name, line] += 1


def note_allocations(number: int = 1) -> None:
    """Record allocations of device memory."""
    if _records and number:
        line = find_line()
        for record in _records:
            record.allocations[line] += number


def note_copy(what: str) -> None:
    """Record a copy between host and device that the host does not wait for."""
    if _records:
        line = find_line()
        for record in _records:
            record.copies.append((what, line))


def note_wait(what: str) -> None:
    """Record a wait of the host, or raise HostWaitError if it is forbidden."""
    if is_capturing():
        refuse_in_capture(what)
    if not _records and not _forbidden:
        return
    line = find_line()
    for record in _records:
        record.waits.append((what, line))
    if _forbidden:
        error = HostWaitError(f"the host waits for the device ({what}) at {line}")
        for seen in _forbidden:
            seen.append(error)
        raise error


def is_capturing() -> bool:
    """Return whether a graph is being captured."""
    return bool(captures)


def refuse_in_capture(what: str) -> None:
    """Raise as CUDA does for an operation that cannot be captured."""
    if captures:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing "
            f"({what} at {find_line()})"
        )


def find_line() -> str:
    """Return the innermost line of the packages or tools, else of the test, that is running."""
    frame: FrameType | None = sys._getframe(1)
    outer = None
    while frame is not None:
        place = _classify(frame.f_code.co_filename)
        if place is not None:
            name, is_source = place
            line = f"{name}:{frame.f_lineno}"
            if is_source:
                return line
            outer = outer or line
        frame = frame.f_back
    return outer or "backward (a thread of autograd)"


@functools.cache
def _classify(file: str) -> tuple[str, bool] | None:
    """Return a file's name and whether it is our source, None for torch, Python and this tool."""
    path = Path(file)
    if file.startswith("<") or "site-packages" in path.parts or path.parent in _HARNESS:
        return None
    if path.is_relative_to(_STANDARD_LIBRARY):
        return None
    if not path.is_relative_to(_REPOSITORY):
        return file, False
    name = path.relative_to(_REPOSITORY)
    return str(name), name.parts[0] in ("packages", "tools") and "tests" not in name.parts
