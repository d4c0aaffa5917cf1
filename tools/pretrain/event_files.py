"""TensorBoard event files, cut back to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OVER_SAMPLES = " vs samples"


def forget_later_events(folder: Path, *, step: int, samples: int) -> None:
    """Drop the scalars that an earlier start logged after the checkpoint this one goes on from.

    TensorBoard's own way, a writer with ``purge_step``, knows one axis only and would take the
    scalars over samples away.

    Args:
        folder: where the event files are; it may not exist.
        step: the last step to keep.
        samples: the last number of samples to keep, for scalars drawn over samples.
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
