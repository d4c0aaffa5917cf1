"""Common parts of sinks: the protocol, plain numbers, a guard, and a sink in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mcore.observe.sinks.delivery.spool import EarlierSpools, Spool
from mcore.observe.sinks.scalars import (
    as_name,
    as_number,
    is_one_number,
    only_numbers,
    read_scalars,
)
from mcore.observe.sinks.secrets import mask_secrets
from mcore.versioning import accepts_parameter

logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 10


@runtime_checkable
class MetricSink(Protocol):
    """Takes named numbers for a step: a tracker, a file, or anything that the user writes.

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
        """Take the metrics of one step.

        Args:
            metrics: Numbers by name; NaN and infinities included.
            step: The step; never smaller than in earlier calls, but it may repeat.
        """
        ...

    def flush(self) -> None:
        """Deliver everything taken so far to where it is kept."""
        ...

    def close(self, status: str = "FINISHED") -> None:
        """Flush and take nothing more; closing twice is fine.

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
    versus_samples: bool = False  # it also gets some scalars over the samples consumed


def _do_nothing(client: Any, *args: Any) -> None:
    pass


@dataclass(frozen=True)
class Opening:
    """What a run of a tracker is opened from."""

    settings: Any  # of the logger
    config: Any = None  # the whole configuration, whose texts the tracker may show
    run_id: str | None = None  # of a run to continue
    resume_step: int | None = None  # the last step of that run that counts
    spool: Spool | None = None
    earlier: EarlierSpools | None = None
    on_open: Callable[[str], None] | None = None

    @property
    def closing_s(self) -> float:
        """Seconds that the end of the run waits for the tracker."""
        seconds = as_number(getattr(self.settings, "closing_s", None))
        return 10.0 if seconds is None else float(seconds)

    def options(self) -> dict[str, Any]:
        """Return what every background run is made with."""
        return {
            "spool": self.spool,
            "closing_s": self.closing_s,
            "earlier": self.earlier,
            "on_open": self.on_open,
        }


@dataclass(frozen=True)
class Tracker:
    """A product that runs can be logged to: the settings that ask for it, and how it is used."""

    attribute: str  # of a GlobalState, which keeps the client
    label: str  # in messages
    extra: str  # what to install
    asked_by: str  # the setting that asks for it
    named_by: str | None  # the setting that then has to name the run
    settings: tuple[str, ...]  # that a replay needs
    open: Callable[[Opening], Any]  # never waits
    adapt: Callable[[Any], MetricSink]
    module: str  # that takes long to import
    rules: ScalarRules = ScalarRules()
    restart: Callable[[Any], None] = _do_nothing  # before training starts again in this process
    continues_at_restart: bool = False  # the same run

    @property
    def short_name(self) -> str:
        """The name in files."""
        return self.extra

    def is_wanted(self, settings: Any) -> bool:
        """Return whether logger settings ask for it; a ValueError if its run has no name."""
        wanted = getattr(settings, self.asked_by, None)
        if wanted is None:
            return False
        if self.named_by is not None and not getattr(settings, self.named_by, None):
            raise ValueError(
                f"{self.asked_by} is {wanted!r} but {self.named_by} is missing; give the run a name"
            )
        return True


class GuardedSink:
    """A sink whose exceptions become log messages.

    The first exception of each type is logged with level WARNING, later ones are not. After ten
    failures in a row there is one ERROR and the sink gets nothing more.

    Args:
        name: The sink's name for the messages.
        sink: What takes the metrics.
        secrets: Texts that no message may show, besides those that look like secrets.

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
        """Hand the metrics over, unless the sink was switched off or there are none."""
        if metrics and self.is_on:
            self._attempt("log", lambda: self.sink.log(metrics, step))

    def flush(self) -> None:
        """Flush the sink, unless it was switched off."""
        if self.is_on:
            self._attempt("flush", self.sink.flush)

    def close(self, status: str = "FINISHED") -> None:
        """Close the sink with the status of the run, switched off or not."""
        self._attempt("close", lambda: _close(self.sink, status))

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

    def close(self, status: str = "FINISHED") -> None:
        """Do nothing."""


def accepts(function: Any, parameter: str) -> bool:
    """Return whether a function takes a parameter of this name."""
    try:
        return accepts_parameter(function, parameter)
    except (TypeError, ValueError):
        return False


def _close(sink: MetricSink, status: str) -> None:
    if accepts(sink.close, "status"):
        sink.close(status=status)
    else:
        sink.close()


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python numbers, which every tracker takes, with one read per device.

    None is left out, and so is anything else that is not a number, with one WARNING for each name.
    """
    values = metrics.values()
    if set(map(type, values)) <= {float, int} and all(
        is_one_number(value) for value in values if type(value) is int
    ):
        numbers: dict[str, float] = dict(metrics)
    else:
        numbers = read_scalars(only_numbers(metrics))
    if set(map(type, numbers)) <= {str} and "".join(numbers).isascii():
        return numbers
    return {as_name(name): value for name, value in numbers.items()}
