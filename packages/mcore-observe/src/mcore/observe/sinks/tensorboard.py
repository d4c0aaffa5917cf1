"""TensorBoard: event files, which need neither a background thread nor a spool."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore.observe.files import replacing
from mcore.observe.sinks.base import ScalarRules, TrackerSpec
from mcore.observe.sinks.delivery.tracker_run import Opening
from mcore.observe.sinks.scalars import plain_numbers
from mcore.observe.sinks.secrets import config_params

logger = logging.getLogger(__name__)

_FLUSH_S: Any = 0.1  # the writer's annotation says int, its clock is a float
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
        self._is_closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one scalar for each metric."""
        if self._is_closed:  # a SummaryWriter would open another file
            raise ValueError("the TensorBoard sink is closed; make another one to log")
        for name, value in plain_numbers(metrics).items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flush the writer."""
        self._writer.flush()

    def close(self, status: str = "FINISHED") -> None:
        """Close the writer."""
        self._is_closed = True
        self._writer.close()


def forget_later_events(folder: Path, step: int) -> None:
    """Drop the scalars of event files after a step, also scalars plotted over samples.

    A writer's ``purge_step`` would treat samples as steps. The n-th value of a scalar over samples
    belongs to the step of the n-th value of the scalar with the same name over steps.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        if path.suffix != ".partial":  # of a killed process
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
    with replacing(path) as file:
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


def _read_events(path: Path) -> Iterator[Any]:
    """Yield the complete records. A killed process leaves an incomplete last one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for record in RawEventFileLoader(str(path)).Load():
        yield Event.FromString(record)


def _open(opening: Opening) -> Any:
    """Return a ``SummaryWriter``, or None with a WARNING: an error would stop one rank only."""
    folder = Path(os.fspath(opening.settings.tensorboard_dir))
    try:
        TRACKER.require()
        from torch.utils.tensorboard import SummaryWriter

        if opening.resume_step is not None:
            forget_later_events(folder, opening.resume_step)
        # A killed process loses only the last moments. The writer would keep two minutes.
        queue = opening.settings.tensorboard_queue_size
        # It opens its file by name and follows links. Nobody can plant one at an unknown name.
        suffix = f".{os.urandom(8).hex()}"
        writer: Any = SummaryWriter(
            log_dir=str(folder), max_queue=queue, flush_secs=_FLUSH_S, filename_suffix=suffix
        )
        params = config_params(opening.config)
        if params and opening.resume_step is None:
            # Without an experiment's summary, the HParams tab shows all scalars of the run.
            summary: Any = import_module("torch.utils.tensorboard.summary")
            _, start, _ = summary.hparams(params, {})
            writer.file_writer.add_summary(start)
        return writer
    except Exception as error:
        logger.warning("cannot write event files to %s: %s", folder, error)
        return None


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
    is_local=True,
)
