"""A sink that writes one line of JSON for each step, for runs without a tracker."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from mcore.observe.sinks.base import plain_numbers

_TAIL_BLOCK_BYTES = 64 * 1024


class JsonlSink:
    """Appends ``{"step": ..., "<metric>": ...}`` lines to a file.

    Each line goes to the operating system before :meth:`log` returns, so that a killed process
    keeps what it logged. An existing file is continued; a last line that a crash left without its
    end is completed if it is whole JSON, else removed. A run that goes back to a checkpoint
    logs some steps again: the later line of a step is the valid one.

    One process writes one file: make the sink on one rank, or give each rank its own path.

    Args:
        path: The file; missing folders are made.

    Raises:
        OSError: The file cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> sink = JsonlSink(path)
        >>> sink.log({"lm loss": 2.5, "grad-norm": float("nan")}, step=1)
        >>> path.read_text()
        '{"step": 1, "lm loss": 2.5, "grad-norm": null}\\n'
        >>> sink.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            _repair_last_line(file)
        self._file = self.path.open("ab")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line; NaN and infinities become null.

        Args:
            metrics: Numbers by name; the name ``step`` is reserved.
            step: The step.

        Raises:
            ValueError: A metric is called ``step``, or the sink is closed.
            OSError: The line cannot be written.
        """
        if "step" in metrics:
            raise ValueError("a metric is called 'step', which names the step; rename it")
        numbers = plain_numbers(metrics)
        record = {"step": int(step)} | {name: _as_json(v) for name, v in numbers.items()}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        """Write the lines to the disk, so that they survive a crash of the machine too."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()


def _as_json(value: float) -> float | int | None:
    return value if math.isfinite(value) else None


def _repair_last_line(file: BinaryIO) -> None:
    start, line = _last_line(file)
    if not line:
        return
    if _is_record(line):
        file.write(b"\n")
    else:
        file.truncate(start)


def _last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Return where the line without a newline at the end of a file starts, and its bytes."""
    start = file.seek(0, os.SEEK_END)
    line = b""
    while start > 0:
        size = min(_TAIL_BLOCK_BYTES, start)
        file.seek(start - size)
        block = file.read(size)
        cut = block.rfind(b"\n") + 1
        line = block[cut:] + line
        start -= size - cut
        if cut:
            break
    return start, line


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
