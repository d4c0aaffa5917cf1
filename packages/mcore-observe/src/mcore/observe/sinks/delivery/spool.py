"""Metrics on their way to a tracker, on the disk: a killed process loses its last moments only."""

from __future__ import annotations

import collections
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore.observe.sinks.scalars import is_one_number

logger = logging.getLogger(__name__)

_SUFFIX = ".spool.jsonl"
_ENDING_S = 2.0  # that the end of a run waits for the disk
_PAUSE_S = 0.05  # between two writes: the steps of that time share a write
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
            self._num_arrived += last - first + 1
            if not 0 < first <= last or self._num_arrived > self._num_read:
                raise ValueError("more metrics have arrived than the file has")
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
    """An append-only file of metrics and of their arrival, written by a separate thread.

    It is not the sender's thread, which can hang in a call to the tracker for minutes: a line
    reaches the operating system within a tenth of a second and so outlives the process. The file
    is locked while the process lives, and removed once everything has arrived. If it cannot be
    written there is one WARNING, and nothing is kept.
    """

    def __init__(self, folder: Path, tracker: str, facts: Mapping[str, Any]) -> None:
        name = f"{tracker}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"
        self.path = folder / f"{name}{_SUFFIX}"
        self.num_left = 0
        self._changed = threading.Condition()
        self._lines: collections.deque[dict[str, Any]] = collections.deque([{"facts": dict(facts)}])
        self._file: int | None = None
        self._size = 0
        self._large_bytes = _LARGE_BYTES
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._is_closed = False  # after a failure, or at the end
        self._is_unwanted = False

    @property
    def run_folder(self) -> Path:
        """The folder to pass to a replay."""
        return self.path.parent.parent if self.path.parent.name == "spool" else self.path.parent

    def append(self, entry: StepMetrics) -> None:
        """Keep an entry, without waiting for the disk."""
        self.num_left += 1
        self._put(entry.as_record())

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add facts, such as the run's id once it is known."""
        self._put({"facts": dict(facts)})

    def settle(self, entries: Iterable[StepMetrics]) -> None:
        """Note that entries have arrived, or were refused for good."""
        numbers = [entry.number for entry in entries]
        if numbers:
            self.num_left -= len(numbers)
            self._put({"arrived": list(_merge_ranges(numbers))})

    def sync(self, timeout_s: float = _ENDING_S) -> bool:
        """Wait until the operating system has all lines, and return whether it has."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (self._lines or self._is_writing) and not self._is_closed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._thread is None or not self._thread.is_alive():
                    break
                self._changed.wait(min(left_s, 0.2))
            # The thread ends with the interpreter. A closed file must not be opened a second time.
            if self._lines and not self._is_writing and not self._is_closed:
                self._write(self._take())
                self._is_writing = False
            return not self._lines and not self._is_closed

    def remove(self) -> None:
        """Remove the file: everything has arrived."""
        with self._changed:
            self._is_closed = self._is_unwanted = True
            self._lines.clear()
            # If the disk hangs longer, the thread removes the file after its write.
            if self._changed.wait_for(lambda: not self._is_writing, _ENDING_S):
                self._close()

    def leave(self) -> bool:
        """Write the rest, leave the file to a replay, and return whether it is on the disk."""
        is_kept = self.sync()
        with self._changed:
            self._is_closed = True
            if not self._is_writing:
                self._close()
        return is_kept

    def _put(self, line: dict[str, Any]) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"mcore.observe spool {self.path.name}", daemon=True
                )
                self._thread.start()
            elif len(self._lines) == 1:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    if self._is_closed:
                        return
                    self._changed.wait()
                lines = self._take()
            self._write(lines)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                if self._is_closed:
                    self._close()
                    return
            time.sleep(_PAUSE_S)

    def _take(self) -> list[dict[str, Any]]:
        lines = list(self._lines)
        self._lines.clear()
        self._is_writing = True
        return lines

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        data = b"".join(map(_encode_line, lines))
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _open_locked(self.path)
            _write_all(self._file, data)
            self._size += len(data)
            if self._size > self._large_bytes:
                self._rewrite()
        except OSError as error:
            self._is_closed = True
            logger.warning(
                "cannot write %s (%s): metrics not yet delivered are lost if this process is "
                "killed",
                self.path,
                error,
            )

    def _rewrite(self) -> None:
        """Write the file anew without the entries that have arrived."""
        contents = read_spool(self.path)
        partial = self.path.with_suffix(".partial")
        # Locked before it gets its name: no replay can take it in between.
        file = _open_locked(partial)
        entries = [entry.as_record() for entry in contents.entries.values()]
        data = b"".join(map(_encode_line, [{"facts": contents.facts}, *entries]))
        _write_all(file, data)
        os.replace(partial, self.path)
        if self._file is not None:
            os.close(self._file)
        self._file, self._size = file, len(data)
        # A file that stays large is not rewritten with every write.
        self._large_bytes = max(_LARGE_BYTES, 2 * len(data))

    def _close(self) -> None:
        """Close the file, and remove it if it is unwanted."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._is_unwanted:
            self.path.unlink(missing_ok=True)
            _remove_if_empty(self.path.parent)


def spool_files(folder: Path, tracker: str = "") -> list[Path]:
    """Return the spool files of a folder, the oldest first."""
    return sorted(folder.glob(f"{tracker}*{_SUFFIX}")) if folder.is_dir() else []


def read_spool(path: Path) -> SpoolContents:
    """Read a spool file. Damaged lines, such as an incomplete last one, are skipped.

    A complete line that no spool writes is a WARNING, one for the file.
    """
    contents, damaged = SpoolContents(), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
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
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
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
        _remove_if_empty(self.path.parent)

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
            except (BlockingIOError, FileNotFoundError):
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
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
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


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # it has files of other trackers
        return
