"""A sink that writes lines of JSON, for runs without a tracker, and their reader."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from mcore.observe.files import open_plain, replacing
from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks.delivery.spool import lock, record_of
from mcore.observe.sinks.scalars import plain_numbers

logger = logging.getLogger(__name__)

_TAIL_BLOCK_BYTES = 64 * 1024
_RESERVED = {"step": "names the step", "time": "is when a line was written"}
_MOST_WAITING_BYTES = 64 * 1024 * 1024


class JsonlSink:
    """Appends ``{"step": ..., "time": ..., "<metric>": ...}`` lines to a file.

    The time is when a line was written, in seconds since 1970.

    Each line reaches the operating system before :meth:`log` returns: a killed process loses no
    line. If the disk is full, lines wait in memory until a later line can be written, and the
    first of them raises an OSError. The first line continues an existing file. If a crash has
    left a last line without its end, the line is completed if it is whole JSON, else removed. A
    run that continues from an earlier checkpoint logs some steps twice. The later line of a step
    is valid, unless ``resume_step`` has the earlier lines removed.

    One process writes one file, from any of its threads. A :class:`mcore.observe.GlobalState` uses
    the sinks of the last rank only, so every rank may make one. In other programs give each rank a
    separate path.

    Args:
        path: The file. Missing folders are created.
        resume_step: The first line removes the lines of later steps. None keeps them.

    Raises:
        OSError: The file cannot be opened, or is a link.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> sink = JsonlSink(path)
        >>> sink.log({"lm loss": 2.5, "grad-norm": float("nan")}, step=1)
        >>> path.read_text()  # doctest: +ELLIPSIS
        '{"step": 1, "time": ..., "lm loss": 2.5, "grad-norm": null}\\n'
        >>> sink.close()
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Raises now if it cannot be opened, not at the first step.
        with open(self.path, "ab", opener=open_plain) as file:
            self._inode = os.fstat(file.fileno()).st_ino
        self._resume_step = resume_step
        self._file: IO[bytes] | None = None
        self._waiting = bytearray()
        self._is_closed = False
        self._lock = threading.RLock()  # a signal handler may close the sink during a write

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line. NaN and infinities become null.

        Args:
            metrics: Numbers by name. The names ``step`` and ``time`` are reserved.
            step: The step.

        Raises:
            ValueError: The sink is closed.
            OSError: The line cannot be written now. It waits in memory, and so do later lines.
        """
        if self._is_closed:
            raise ValueError(f"the sink of {self.path} is closed; make another one to log")
        record = {
            name: value if math.isfinite(value) else None  # JSON has no NaN
            for name, value in plain_numbers(metrics).items()
        }
        for name in _RESERVED.keys() & record:
            text = "a metric is called %r, which %s, and is not written: rename it"
            warn_once(logger, text, name, _RESERVED[name])
            del record[name]
        head = {"step": int(step), "time": round(time.time(), 3)}
        line = json.dumps(head | record, allow_nan=False)
        with self._lock:
            others_wait = bool(self._waiting)
            if len(self._waiting) > _MOST_WAITING_BYTES:
                self._write()  # raises before the line is added: memory stays bounded
            self._waiting += line.encode() + b"\n"
            try:
                self._write()
            except OSError:
                if not others_wait:
                    raise

    def flush(self) -> None:
        """Write the lines to the disk, where they survive a crash of the machine too.

        Raises:
            OSError: Some cannot be written.
        """
        with self._lock:
            self._write()
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self, status: str = "FINISHED") -> None:
        """Close the file. Closing twice is fine.

        Raises:
            OSError: Some lines could not be written.
        """
        with self._lock:
            try:
                self._write()
            finally:
                if self._file is not None:
                    self._file.close()
                self._file, self._is_closed = None, True
                self._waiting.clear()

    def _write(self) -> None:
        """Write the waiting lines. Bytes that a full disk refuses keep waiting."""
        while self._waiting:
            del self._waiting[: self._open().write(self._waiting)]

    def _open(self) -> IO[bytes]:
        if self._file is None:
            # This process may have been frozen, and a later start may have a new file here.
            with open(self.path, "rb", opener=open_plain) as made:
                if os.fstat(made.fileno()).st_ino != self._inode:
                    raise FileExistsError(f"a later run has made {self.path} anew, and writes it")
            if self._resume_step is not None:
                self._forget_later_steps(self._resume_step)
                self._inode = self.path.stat().st_ino
            with open(self.path, "ab+", opener=open_plain) as file:
                _repair_last_line(file)
            # Unbuffered: a write is with the operating system when it returns.
            self._file = open(self.path, "ab", buffering=0, opener=open_plain)  # noqa: SIM115
            try:
                lock(self._file.fileno())
            except BlockingIOError:
                logger.warning("another run writes %s too: give each a separate folder", self.path)
        return self._file

    def _forget_later_steps(self, step: int) -> None:
        with replacing(self.path) as file:
            for record in records_of(self.path, with_time=True):
                if record["step"] <= step:
                    file.write(json.dumps(record).encode() + b"\n")


def records_of(path: Path, *, with_time: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the records of a file that a :class:`mcore.observe.JsonlSink` writes.

    Args:
        path: The file, which may grow at the same time. A last line without its end is skipped,
            and so are damaged lines.
        with_time: Whether records have their ``time``. Old lines have none.

    Yields:
        A dict for each line, with its ``step`` and metrics.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> JsonlSink(path).log({"lm loss": 2.5}, 1)
        >>> list(records_of(path))
        [{'step': 1, 'lm loss': 2.5}]
    """
    with path.open("rb") as file:
        for line in file:
            record = record_of(line)
            if record is not None and isinstance(record.get("step"), int):
                if not with_time:
                    record.pop("time", None)
                yield record


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file that one process writes. Its last line is repaired first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", opener=open_plain) as file:
        _repair_last_line(file)
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def as_float(value: Any) -> float:
    """Return a number of a record. Other values and too large integers become NaN."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _repair_last_line(file: BinaryIO) -> None:
    """Complete a last line that has no newline if it is a record, else remove it."""
    start = file.seek(0, os.SEEK_END)
    line = b""
    while start > 0:  # read backwards in blocks until a newline
        size = min(_TAIL_BLOCK_BYTES, start)
        file.seek(start - size)
        block = file.read(size)
        cut = block.rfind(b"\n") + 1
        line = block[cut:] + line
        start -= size - cut
        if cut:
            break
    # The line lacks only its newline, which the reader of records requires.
    if line and record_of(line + b"\n") is not None:
        file.write(b"\n")
    elif line:
        file.truncate(start)
