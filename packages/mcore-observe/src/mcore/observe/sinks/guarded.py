"""Keeps a failing sink from stopping the training run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from mcore.observe.secret_texts import mask_secrets
from mcore.observe.sinks.protocol import MetricSink

__all__ = ["GuardedSink"]

logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 10


class GuardedSink:
    """A sink whose exceptions become log messages.

    The first exception of each type is logged with level WARNING, later ones are not. After ten
    failures in a row there is one ERROR and the sink gets nothing more.

    Args:
        name: The sink's name for the messages.
        sink: What takes the metrics.
        secrets: Texts that no message may show, besides those that look like secrets.

    Example:
        >>> from mcore.observe.sinks.memory import MemorySink
        >>> kept = MemorySink()
        >>> GuardedSink("memory", kept).log({"lm loss": 2.5}, 1)
        >>> kept.steps
        {1: {'lm loss': 2.5}}
    """

    def __init__(self, name: str, sink: MetricSink, *, secrets: Sequence[str] = ()) -> None:
        self.name = name
        self.sink = sink
        self._secrets = tuple(secrets)
        self._failures_in_a_row = 0
        self._reported: set[type[BaseException]] = set()

    @property
    def is_on(self) -> bool:
        """Whether the sink still gets metrics."""
        return self._failures_in_a_row < _MAX_FAILURES_IN_A_ROW

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the metrics over, unless the sink was switched off or there are none."""
        if metrics and self.is_on:
            self._attempt("log", lambda: self.sink.log(metrics, step))

    def flush(self) -> None:
        """Flush the sink, unless it was switched off."""
        if self.is_on:
            self._attempt("flush", self.sink.flush)

    def close(self) -> None:
        """Close the sink, switched off or not."""
        self._attempt("close", self.sink.close)

    def _attempt(self, action: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._note_failure(action, error)
        else:
            self._failures_in_a_row = 0

    def _note_failure(self, action: str, error: Exception) -> None:
        self._failures_in_a_row += 1
        if type(error) not in self._reported:
            self._reported.add(type(error))
            logger.warning(
                "%s failed to %s metrics, training goes on without them: %s: %s",
                self.name,
                action,
                type(error).__name__,
                mask_secrets(str(error), self._secrets),
            )
        if self._failures_in_a_row == _MAX_FAILURES_IN_A_ROW:
            logger.error(
                "%s failed %d times in a row and gets no more metrics",
                self.name,
                self._failures_in_a_row,
            )
