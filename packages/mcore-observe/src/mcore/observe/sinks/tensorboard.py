"""TensorBoard event files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mcore.observe.sinks.base import ScalarRules, Tracker, plain_numbers


class TensorBoardSink:
    """Hands metrics to anything with ``add_scalar(name, value, step)``.

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
        for name, value in plain_numbers(metrics).items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flush the writer."""
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


def _open(settings: Any, config: Any, earlier_run_id: str | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    folder = os.fspath(settings.tensorboard_dir)
    return SummaryWriter(log_dir=folder, max_queue=settings.tensorboard_queue_size)


TRACKER = Tracker(
    attribute="tensorboard_logger",
    label="TensorBoard",
    extra="tensorboard",
    asked_by="tensorboard_dir",
    named_by=None,
    open=_open,
    adapt=TensorBoardSink,
    rules=ScalarRules(left_out=frozenset({"samples vs steps"}), versus_samples=True),
    restart=lambda writer: writer.close(),
)
