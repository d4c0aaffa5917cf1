"""A sink that keeps metrics in memory."""

from __future__ import annotations

from collections.abc import Mapping

from mcore.observe.sinks.plain_numbers import plain_numbers

__all__ = ["MemorySink"]


class MemorySink:
    """Keeps the metrics of every step, for notebooks and tests.

    Attributes:
        steps: The metrics by step; metrics of the same step are merged.

    Example:
        >>> sink = MemorySink()
        >>> sink.log({"lm loss": 2.5}, 1)
        >>> sink.log({"grad-norm": 0.5}, 1)
        >>> sink.steps
        {1: {'lm loss': 2.5, 'grad-norm': 0.5}}
    """

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics of one step."""
        self.steps.setdefault(step, {}).update(plain_numbers(metrics))

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
