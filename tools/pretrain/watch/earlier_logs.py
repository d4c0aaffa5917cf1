"""Logs of earlier starts: read, and cut back to the checkpoint that this one continues from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore.observe import TrainState
from pretrain.run_folder import RunFolder

_OVER_SAMPLES = " vs samples"


def forget_later_logs(folder: RunFolder, train_state: TrainState) -> None:
    """Drop what an earlier start logged after the checkpoint that this one continues from."""
    _forget_later_steps(folder.metrics, train_state.step)
    forget_later_events(
        folder.tensorboard, step=train_state.step, samples=train_state.consumed_train_samples
    )


def records_up_to(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The records of steps up to this one, of a file that may grow or be replaced meanwhile."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # a killed process leaves the last one cut off
                record = json.loads(line)
                if record["step"] <= step:
                    yield record


def _forget_later_steps(path: Path, step: int) -> None:
    """Drop what an earlier start logged after the checkpoint that this one continues from."""
    if not path.exists():
        return
    partial = path.with_suffix(".jsonl.partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records_up_to(path, step))
    partial.replace(path)


def forget_later_events(folder: Path, *, step: int, samples: int) -> None:
    """Drop TensorBoard's scalars after a step, or after that many samples where plotted over those.

    A writer with ``purge_step`` knows one axis only and would remove the scalars over samples.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else []:
        _rewrite(path, step, samples)


def _rewrite(path: Path, step: int, samples: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    partial = path.with_name("partial-" + path.name)
    with partial.open("wb") as file:
        writer = RecordWriter(file)
        for record in _records(path):
            event = Event.FromString(record)
            if event.HasField("summary"):
                kept = [v for v in event.summary.value if _is_kept(v, event.step, step, samples)]
                if not kept:
                    continue
                del event.summary.value[:]
                event.summary.value.extend(kept)
            writer.write(event.SerializeToString())
        writer.flush()
    partial.replace(path)


def _records(path: Path) -> Iterator[bytes]:
    """The complete records; a killed process leaves the last one cut off."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    yield from RawEventFileLoader(str(path)).Load()


def _is_kept(value: Any, at: int, step: int, samples: int) -> bool:
    return bool(at <= (samples if value.tag.endswith(_OVER_SAMPLES) else step))
