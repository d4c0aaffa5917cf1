"""Metrics on their way to a tracker, on the disk: a killed process loses its last moments only."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore.observe.files import open_plain
from mcore.observe.sinks.scalars import is_one_number

logger = logging.getLogger(__name__)

_SUFFIX = ".spool.jsonl"
_LARGE_BYTES = 8 << 20  # a file of this size is rewritten without the metrics that have arrived


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step. The time is when they were logged, in milliseconds since 1970.

    The number counts the entries of one sender, from 1.
    """

    metrics: Mapping[str, float]
    step: int
    time_ms: int
    number: int = 0

    def as_record(self) -> dict[str, Any]:
        """Return the line of a spool file."""
        return {
            "number": self.number,
            "step": self.step,
            "time_ms": self.time_ms,
            "metrics": self.metrics,
        }


@dataclass
class SpoolContents:
    """Facts about the run of a spool file, and the entries that have not arrived."""

    facts: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, StepMetrics] = field(default_factory=dict)

    _num_read: int = 0
    _num_arrived: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Apply one line of the file. An error of any type for values that no spool writes."""
        if "facts" in record:
            self.facts.update(record["facts"])
        for first, last in record.get("arrived", ()):
            arrived = self._num_arrived + last - first + 1
            if not 0 < first <= last or arrived > self._num_read:
                raise ValueError("more metrics have arrived than the file has")
            self._num_arrived = arrived
            for number in range(first, last + 1):
                self.entries.pop(number, None)
        if "metrics" in record:
            number, metrics = int(record["number"]), dict(record["metrics"])
            if not all(map(is_one_number, metrics.values())):
                raise TypeError("a metric is not a number")
            step, time_ms = int(record["step"]), int(record["time_ms"])
            self.entries[number] = StepMetrics(metrics, step, time_ms, number)
            self._num_read += 1


class Spool:
    """An append-only file of metrics and of their arrival.

    The training step appends each line itself, so the line outlives the process from then on. The
    sender's thread notes arrivals and shortens the file. It may hang in a call to the tracker for
    minutes, and holds no lock meanwhile. The file is locked while the process lives, and removed
    once everything has arrived. If it cannot be written there is one WARNING, and nothing is kept.
    """

    def __init__(self, folder: Path, tracker: str, facts: Mapping[str, Any]) -> None:
        name = f"{tracker}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"
        self.path = folder / f"{name}{_SUFFIX}"
        self.num_left = 0
        self._facts = dict(facts)
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        self._large_bytes = _LARGE_BYTES
        self._is_closed = False  # after a failure, or at the end

    @property
    def run_folder(self) -> Path:
        """The folder to pass to a replay."""
        return self.path.parent.parent if self.path.parent.name == "spool" else self.path.parent

    def append(self, entry: StepMetrics) -> None:
        """Append an entry. The first one makes the file."""
        with self._lock:
            self.num_left += 1
            self._write(entry.as_record())

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add facts, such as the run's id once it is known."""
        with self._lock:
            self._facts.update(facts)
            if self._file is not None:
                self._write({"facts": dict(facts)})

    def settle(self, entries: Iterable[StepMetrics]) -> None:
        """Note that entries have arrived, or were refused for good. Only the sender's thread."""
        numbers = [entry.number for entry in entries]
        if numbers:
            with self._lock:
                self.num_left -= len(numbers)
                self._write({"arrived": list(_merge_ranges(numbers))})
            if self._size > self._large_bytes:
                self._guard(self._shorten)

    def remove(self) -> None:
        """Remove the file: everything has arrived."""
        self.leave()
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # it has files of other trackers
            self.path.parent.rmdir()

    def leave(self) -> bool:
        """Leave the file to a replay, and return whether it has everything."""
        with self._lock:
            is_written = not self._is_closed and self._file is not None
            self._is_closed = True
            if self._file is not None:
                os.close(self._file)
            self._file = None
        return is_written

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line. The caller holds the lock."""
        if not self._is_closed:
            self._guard(lambda: self._append(_encode_line(line)))

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self.path)
            data = _encode_line({"facts": self._facts}) + data
        _write_all(self._file, data)
        self._size += len(data)

    def _shorten(self) -> None:
        """Write the file anew without the entries that have arrived.

        The lock is held only for the lines that steps have appended since the beginning.
        """
        seen, old = self._size, self._file
        if old is None:
            return
        contents = _read_lines(os.pread(old, seen, 0).splitlines(keepends=True))
        partial = self.path.with_suffix(".partial")
        # Locked before it gets its name: no replay can take it in between.
        file = _open_locked(partial)
        entries = [entry.as_record() for entry in contents.entries.values()]
        data = b"".join(map(_encode_line, [{"facts": contents.facts}, *entries]))
        _write_all(file, data)
        with self._lock:
            if self._is_closed:
                os.close(file)
                partial.unlink()
                return
            tail = os.pread(old, self._size - seen, seen)
            _write_all(file, tail)
            os.replace(partial, self.path)
            os.close(old)
            self._file, self._size = file, len(data) + len(tail)
            # A file that stays large is not shortened with every call.
            self._large_bytes = max(_LARGE_BYTES, 2 * self._size)

    def _guard(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._is_closed = True
            logger.warning(
                "cannot write %s (%s): metrics not yet delivered are lost if this process is "
                "killed",
                self.path,
                error,
            )


def spool_files(folder: Path, tracker: str = "") -> list[Path]:
    """Return the spool files of a folder, the oldest first."""
    return sorted(folder.glob(f"{tracker}*{_SUFFIX}")) if folder.is_dir() else []


def read_spool(path: Path) -> SpoolContents:
    """Read a spool file. Damaged lines, such as an incomplete last one, are skipped.

    A complete line that no spool writes is a WARNING, one for the file.
    """
    with path.open("rb") as file:
        return _read_lines(file, path)


def _read_lines(lines: Iterable[bytes], path: Path | None = None) -> SpoolContents:
    contents, damaged = SpoolContents(), 0
    for number, line in enumerate(lines, 1):
        record = record_of(line)
        if record is None:
            continue
        try:
            contents.add(record)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            damaged = damaged or number
    if damaged:
        logger.warning("%s: line %d is damaged and was skipped", path, damaged)
    return contents


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of JSON, or None if the line is incomplete or damaged."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):  # brackets within brackets
        return None
    return record if isinstance(record, dict) else None


class SpoolOwner:
    """The right to send the entries of a dead process's spool file, held until it is removed.

    Raises:
        BlockingIOError: A living process owns the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_plain(path, os.O_RDWR | os.O_APPEND)
        try:
            lock(self._file)
        except BlockingIOError:
            os.close(self._file)
            raise
        self.contents = read_spool(path)

    def settle(self, entries: Iterable[StepMetrics]) -> None:
        """Note that entries have arrived."""
        ranges = list(_merge_ranges(entry.number for entry in entries))
        _write_all(self._file, _encode_line({"arrived": ranges}))

    def remove(self) -> None:
        """Remove the file: everything has arrived."""
        self.path.unlink(missing_ok=True)
        self.close()
        with suppress(OSError):  # it has files of other trackers
            self.path.parent.rmdir()

    def close(self) -> None:
        """Release the file for another replay. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@dataclass(frozen=True)
class EarlierSpools:
    """Spool files of earlier starts of a run. Entries after the resumed step are dropped."""

    folder: Path
    tracker: str
    up_to: int

    def of_run(self, run_id: str) -> Iterator[SpoolOwner]:
        """Yield the unowned files of this run, and of runs that were never opened."""
        for path in spool_files(self.folder, self.tracker):
            try:
                owner = SpoolOwner(path)
            except OSError as error:
                if not isinstance(error, (BlockingIOError, FileNotFoundError)):
                    logger.warning("cannot send the metrics of an earlier start: %s", error)
                continue
            if owner.contents.facts.get("run_id") in (None, "", run_id):
                yield owner
            else:
                owner.close()


def _encode_line(line: Mapping[str, Any]) -> bytes:
    """Return a line of the file. It is empty if JSON cannot represent it."""
    try:
        return json.dumps(line).encode() + b"\n"
    except (TypeError, ValueError):
        return b""


def _merge_ranges(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield the first and last number of each run of successive numbers, which start at 1."""
    first = last = 0
    for number in numbers:
        if first and number == last + 1:
            last = number
            continue
        if first:
            yield [first, last]
        first = last = number
    if first:
        yield [first, last]


def _open_locked(path: Path) -> int:
    file = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    lock(file)
    return file


def lock(file: int) -> None:
    """Lock a file while this process lives, if the system and the file system support it."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
