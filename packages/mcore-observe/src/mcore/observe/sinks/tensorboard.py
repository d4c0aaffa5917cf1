"""TensorBoard: event files that are written in the background."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore.observe.sinks.base import ScalarRules, TrackerSpec
from mcore.observe.sinks.delivery.spool import StepMetrics
from mcore.observe.sinks.delivery.tracker_run import ClientRun, Opening, TrackerRun
from mcore.observe.sinks.scalars import plain_numbers

_OVER_SAMPLES = " vs samples"


class TensorBoardSink:
    """Passes metrics to anything with ``add_scalar(name, value, step)``.

    Args:
        writer: A ``SummaryWriter`` or an object like it.

    Example:
        >>> class Writer:
        ...     def add_scalar(self, name, value, step):
        ...         print(name, value, step)
        >>> TensorBoardSink(Writer()).log({"lm loss": 2.5}, 1)
        lm loss 2.5 1
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one scalar for each metric."""
        if isinstance(self._writer, TrackerRun):
            self._writer.log_metrics(metrics, step)
            return
        for name, value in plain_numbers(metrics).items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flush the writer."""
        self._writer.flush()

    def close(self, status: str = "FINISHED") -> None:
        """Close the writer."""
        if isinstance(self._writer, TrackerRun):
            self._writer.close(status)
        else:
            self._writer.close()


class TensorBoardRun(ClientRun[Any]):
    """A ``SummaryWriter`` that is opened in the background. Scalars wait for it."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Write one scalar in the background.

        Args:
            tag: Its name.
            scalar_value: A number, or a tensor of one element.
            global_step: The step.
        """
        self.log_metrics({tag: scalar_value}, global_step)

    def _write(self, connection: Any, entries: Sequence[StepMetrics]) -> None:
        for entry in entries:
            for name, value in entry.metrics.items():
                connection.add_scalar(name, value, entry.step, walltime=entry.time_ms / 1000)
        connection.flush()

    def _drop_known(self, connection: Any, entries: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
        known = {
            (value.tag, event.step)
            for path in _list_files(Path(connection.log_dir))
            for event in _read_events(path)
            for value in event.summary.value
        }
        return [
            replace(
                entry,
                metrics={n: v for n, v in entry.metrics.items() if (n, entry.step) not in known},
            )
            for entry in entries
        ]

    def _end(self, connection: Any, status: str) -> None:
        connection.close()


def forget_later_events(folder: Path, step: int) -> None:
    """Drop the scalars of event files after a step, also scalars plotted over samples.

    A writer's ``purge_step`` would treat samples as steps. The n-th value of a scalar over samples
    belongs to the step of the n-th value of the scalar with the same name over steps.
    """
    for path in _list_files(folder):
        _rewrite(path, step)


def _rewrite(path: Path, step: int) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    # All events are read before any is written: the file is replaced as a whole or not at all.
    events = list(_read_events(path))
    steps: dict[str, list[int]] = collections.defaultdict(list)
    for event in events:
        for value in event.summary.value:
            steps[value.tag].append(event.step)
    if not any(at > step for tag in steps for at in steps[tag] if not tag.endswith(_OVER_SAMPLES)):
        return
    seen: collections.Counter[str] = collections.Counter()
    partial = path.with_name("partial-" + path.name)
    with partial.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            had_values = bool(event.summary.value)
            kept = []
            for value in event.summary.value:
                twins = steps.get(value.tag.removesuffix(_OVER_SAMPLES), [])
                index = seen[value.tag]
                seen[value.tag] += 1
                if value.tag.endswith(_OVER_SAMPLES) and twins:
                    at = twins[min(index, len(twins) - 1)]
                else:
                    at = event.step
                if at <= step:
                    kept.append(value)
            if had_values:
                if not kept:
                    continue
                del event.summary.value[:]
                event.summary.value.extend(kept)
            writer.write(event.SerializeToString())
        writer.flush()
    partial.replace(path)


def _list_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else []


def _read_events(path: Path) -> Iterator[Any]:
    """Yield the complete records. A killed process leaves an incomplete last one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for record in RawEventFileLoader(str(path)).Load():
        yield Event.FromString(record)


def _open(opening: Opening) -> TensorBoardRun:
    folder = Path(os.fspath(opening.settings.tensorboard_dir))

    def connect() -> Any:
        TRACKER.require()
        with run.preparing():
            from torch.utils.tensorboard import SummaryWriter

        if opening.resume_step is not None:
            forget_later_events(folder, opening.resume_step)
        return SummaryWriter(log_dir=str(folder), max_queue=opening.settings.tensorboard_queue_size)

    with contextlib.suppress(ImportError):
        # Here, not in the thread: it imports parts of torch. If the training thread imports them
        # at the same time, the two imports can deadlock.
        import torch.utils.tensorboard  # noqa: F401
    run = TensorBoardRun(connect, name=TRACKER.label, **opening.options())
    run.open_in_background()
    return run


TRACKER = TrackerSpec(
    name="tensorboard",
    label="TensorBoard",
    module="torch.utils.tensorboard",
    wanted_by="tensorboard_dir",
    named_by=None,
    other_settings=("tensorboard_queue_size",),
    open=_open,
    adapt=TensorBoardSink,
    rules=ScalarRules(left_out=frozenset({"samples vs steps"}), versus_samples=True),
    restart=lambda writer: writer.close(),
)
