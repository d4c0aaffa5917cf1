"""Common parts of sinks: the protocol, a guard, a sink in memory, and the facts of a tracker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mcore.observe.extras import require_extra
from mcore.observe.sinks.delivery.tracker_run import Opening
from mcore.observe.sinks.scalars import plain_numbers
from mcore.observe.sinks.secrets import mask_secrets
from mcore.versioning import accepts_parameter

logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 10


@runtime_checkable
class MetricSink(Protocol):
    """Accepts named numbers of a step: a tracker, a file, or an object of the user.

    Example:
        >>> class Printer:
        ...     def log(self, metrics, step):
        ...         print(step, dict(metrics))
        ...
        ...     def flush(self): ...
        ...
        ...     def close(self, status="FINISHED"): ...
        >>> isinstance(Printer(), MetricSink)
        True
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Accept the metrics of one step.

        Args:
            metrics: Numbers by name, including NaN and infinities.
            step: The step. It is never smaller than in earlier calls, but it may repeat.
        """
        ...

    def flush(self) -> None:
        """Deliver all metrics logged so far."""
        ...

    def close(self, status: str = "FINISHED") -> None:
        """Flush and accept no more metrics. Closing twice is fine.

        Args:
            status: How the run ended: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``. A ``close``
                without this parameter is called without it.
        """
        ...


@dataclass(frozen=True)
class ScalarRules:
    """Which scalars of a step a sink gets, and under which names."""

    left_out: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    versus_samples: bool = False  # some scalars are also logged over the samples consumed


@dataclass(frozen=True)
class TrackerSpec:
    """The facts of a tracker, stated once: its names, its settings and its functions.

    The name is the extra to install, the prefix of its files, and with ``_logger`` the attribute
    of a GlobalState that keeps the client.
    """

    name: str
    label: str  # in messages
    module: str  # of the library, which takes long to import
    wanted_by: str  # the logger setting that turns the tracker on
    named_by: str | None  # the setting that then has to name the run
    other_settings: tuple[str, ...]  # that a replay needs too
    open: Callable[[Opening], Any]  # a TrackerRun, never waits. A writer or None if local
    adapt: Callable[[Any], MetricSink]
    rules: ScalarRules = ScalarRules()
    restart: Callable[[Any], object] = lambda client: (
        None
    )  # before training restarts in this process
    continues_at_restart: bool = False  # the same run
    is_local: bool = False  # it writes files itself, without a spool

    @property
    def attribute(self) -> str:
        """The attribute of a GlobalState that keeps the client."""
        return f"{self.name}_logger"

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the logger settings that a replay needs."""
        named_by = () if self.named_by is None else (self.named_by,)
        return (self.wanted_by, *named_by, *self.other_settings)

    def is_wanted(self, settings: Any) -> bool:
        """Return whether logger settings turn it on. A ValueError if its run has no name."""
        wanted = getattr(settings, self.wanted_by, None)
        if wanted is None:
            return False
        if self.named_by is not None and not getattr(settings, self.named_by, None):
            raise ValueError(
                f"{self.wanted_by} is {wanted!r} but {self.named_by} is missing; give the run a "
                "name"
            )
        return True

    def require(self) -> None:
        """Raise a ModuleNotFoundError that names the extra if the library is not installed."""
        require_extra(self.name, self.wanted_by)


class GuardedSink:
    """A sink whose exceptions become log messages.

    The first exception of each type is logged as WARNING, later ones are not. After ten failures
    in a row there is one ERROR, and the sink gets no more metrics.

    Args:
        name: The sink's name for the messages.
        sink: The guarded sink.
        secrets: Texts to mask in messages, in addition to texts that look like secrets.

    Example:
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
        """Pass the metrics on, unless there are none or the sink was switched off."""
        if metrics and self.is_on:
            self._try("log", lambda: self.sink.log(metrics, step))

    def flush(self) -> None:
        """Flush the sink, unless it was switched off."""
        if self.is_on:
            self._try("flush", self.sink.flush)

    def close(self, status: str = "FINISHED") -> None:
        """Close the sink with the status of the run, even if it was switched off."""
        options = {"status": status} if accepts(self.sink.close, "status") else {}
        self._try("close", lambda: self.sink.close(**options))

    def _try(self, action: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failures_in_a_row += 1
            if type(error) not in self._reported:
                self._reported.add(type(error))
                logger.warning(
                    "%s failed to %s metrics, training continues without them: %s: %s",
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
        else:
            self._failures_in_a_row = 0


class MemorySink:
    """Keeps the metrics of every step, for notebooks and tests.

    Attributes:
        steps: The metrics by step. Metrics of the same step are merged.

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

    def close(self, status: str = "FINISHED") -> None:
        """Do nothing."""


def accepts(function: Any, parameter: str) -> bool:
    """Return whether a function has a parameter of this name. False if it has no signature."""
    try:
        return accepts_parameter(function, parameter)
    except (TypeError, ValueError):
        return False
