"""What a place that takes metrics looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["MetricSink"]


@runtime_checkable
class MetricSink(Protocol):
    """Takes named numbers for a step: a tracker, a file, or anything of the user's.

    Example:
        >>> class Printer:
        ...     def log(self, metrics, step):
        ...         print(step, dict(metrics))
        ...
        ...     def flush(self): ...
        ...
        ...     def close(self): ...
        >>> isinstance(Printer(), MetricSink)
        True
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one step.

        Args:
            metrics: Numbers by name; NaN and infinities included.
            step: The step; not smaller than in earlier calls, but may repeat.
        """
        ...

    def flush(self) -> None:
        """Bring everything taken so far to where it is kept."""
        ...

    def close(self) -> None:
        """Flush and take nothing more; closing twice is fine."""
        ...
