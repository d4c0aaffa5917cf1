"""TensorBoard event files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.sinks.plain_numbers import plain_numbers

__all__ = ["TensorBoardSink", "open_tensorboard"]


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


def open_tensorboard(log_dir: str | os.PathLike[str], queue_size: int = 1000) -> Any:
    """Open a writer of TensorBoard event files.

    Args:
        log_dir: The folder; a new event file is made in it.
        queue_size: Events that may be held back before they are written.

    Returns:
        A ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed; names the extra.
    """
    require_extra("tensorboard", "tensorboard_dir")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(log_dir=os.fspath(log_dir), max_queue=queue_size)
    return writer
