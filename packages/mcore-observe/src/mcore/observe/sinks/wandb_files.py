"""The files of W&B runs that are written offline, which have the format of LevelDB's log."""

from __future__ import annotations

import glob
import json
import os
import struct
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32 << 10
_HEADER_BYTES = 7
_PARTS = (1, 2, 3, 4)  # a whole record, its first part, a middle one, its last one
_FIRST_PARTS = (1, 2)
_LAST_PARTS = (1, 4)
_WRITTEN_S = 10.0


def last_offline_step(save_dir: str | None, run_id: str) -> int:
    """Return the last step in the files of a run that was written offline, else -1."""
    folder = Path(save_dir or os.environ.get("WANDB_DIR") or ".") / "wandb"
    # A start in the same second as another one has a folder with a suffix.
    files = folder.glob(f"offline-run-*/run-{glob.escape(run_id)}.wandb")
    return max((step for path in files for step in offline_steps(path)), default=-1)


def offline_steps(path: Path) -> Iterator[int]:
    """Yield the step of each record of metrics."""
    for record in _records(path.read_bytes(), _HEADER_BYTES):
        if record.WhichOneof("record_type") == "history":
            yield _step_of(record.history)


def wait_until_written(run: Any) -> None:
    """Wait until a finished offline run's file has its end, and so all of its metrics.

    W&B's process writes the last block some time after ``finish`` has returned; killed before
    that it loses it.
    """
    path = Path(run.settings.sync_file) if getattr(run, "offline", False) else None
    deadline_s = time.monotonic() + _WRITTEN_S
    while path is not None and path.exists() and not _has_end(path):
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.01)


def _has_end(path: Path) -> bool:
    """Return whether one of the last records is that of the run's end."""
    whole_blocks = max(0, path.stat().st_size // _BLOCK_BYTES - 2) * _BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(whole_blocks)
        data = file.read()
    ends = _records(data, 0 if whole_blocks else _HEADER_BYTES)
    return any(record.WhichOneof("record_type") == "exit" for record in ends)


def _records(data: bytes, at: int) -> Iterator[Any]:
    """Yield the complete records of whole blocks from a position on."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    record: bytes | None = None
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += _HEADER_BYTES + size
        if kind not in _PARTS or at > len(data):  # a killed process leaves the end cut off
            return
        if kind in _FIRST_PARTS:
            record = b""
        if record is None:  # it begins in an earlier block
            continue
        record += data[at - size : at]
        if kind in _LAST_PARTS:
            yield messages.Record.FromString(record)
            record = None


def _step_of(history: Any) -> int:
    for item in history.item:
        if item.key == "_step":
            return int(json.loads(item.value_json))
    return int(history.step.num)
