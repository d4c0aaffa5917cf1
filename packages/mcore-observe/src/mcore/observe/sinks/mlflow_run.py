"""An MLflow run that is connected to when it is needed, and written in the background."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore.observe.sinks.delivery.spool import EarlierSpools, Spool, StepMetrics
from mcore.observe.sinks.delivery.tracker_run import BackgroundRun

_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_MAX_PARAM_LENGTH = 6000
# HTTP's Request Timeout and Too Many Requests.
_PASSING_STATUS = (408, 429)


@dataclass(frozen=True)
class MlflowConnection:
    """A run that exists in MLflow, and what writes to it.

    Attributes:
        client: An ``mlflow.tracking.MlflowClient``.
        run_id: The run, which stays the one that is written whatever other run is active.
        server: What writes metrics and ends the run, if that is not the client: a
            :class:`mcore.observe.sinks.TrackingServer`.
        last_steps: The last step that the run already has of each metric, by sanitized name; what
            is logged again up to there is left out.
        known: Values that the run already has, by sanitized name and step: the same one is not
            sent again, another one is, and counts as it is the later one.

    Example:
        >>> MlflowConnection(None, "r1", last_steps={"lm loss": 10}).last_steps
        {'lm loss': 10}
    """

    client: Any
    run_id: str
    server: Any = None
    last_steps: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def lacks(self, name: str, step: int, value: float) -> bool:
        """Return whether a value is to be sent.

        Args:
            name: The metric, by its sanitized name.
            step: The step.
            value: The value.

        Returns:
            Whether it is after the last step and differs from the one that is known.

        Example:
            >>> MlflowConnection(None, "r1", known={"lm loss": {3: 2.5}}).lacks("lm loss", 3, 2.5)
            False
        """
        if step <= self.last_steps.get(name, step - 1):
            return False
        known = self.known.get(name, {}).get(step)
        return known is None or _as_kept(known) != _as_kept(value)

    @property
    def writer(self) -> Any:
        """What writes metrics and ends the run: the server, else the client."""
        return self.client if self.server is None else self.server


class MlflowRun(BackgroundRun[MlflowConnection]):
    """One run of an MLflow experiment, which may be logged to before it is open.

    Metrics are sent in the background, those of a second in one call, and a training step never
    waits for them. While the server or the database is away, values are kept and sent when it is
    back, after one WARNING: all of them where there is a spool, else the last 100000.

    The run is opened by :meth:`open`, or in the background, where metrics wait for it in their
    order: a run that cannot be opened is one WARNING, and is retried until it can, unless
    MLflow is not installed or the arguments are wrong.

    It ends when the process does, if not before: ``FINISHED``, ``FAILED`` after an uncaught
    exception or ``sys.exit`` with an error code, ``KILLED`` after SIGTERM or SIGHUP. The first run
    of a process gives these signals a handler, unless they have one, so that the process can
    clean up.

    Args:
        connect: Opens the run: called when it is first needed, and again after it failed. It may
            hand on the connection of another object that was released.
        name: What messages call the tracker.
        spool: A file that keeps what has not arrived, or None.
        closing_s: Seconds that :meth:`close` waits for a tracker that is away.
        earlier: What earlier starts of the run could not send; it is sent first.
        on_open: Called with the run's id once it is open.

    Attributes:
        status: The status that :meth:`close` gives the run when given none.
        num_logged: Values that were logged.

    Example:
        >>> class Client:
        ...     def set_terminated(self, run_id, status):
        ...         print(run_id, status)
        >>> run = MlflowRun(lambda: MlflowConnection(Client(), "r1"))
        >>> run.open().run_id
        'r1'
        >>> run.close()
        r1 FINISHED
    """

    def __init__(
        self,
        connect: Callable[[], MlflowConnection],
        *,
        name: str = "MLflow",
        spool: Spool | None = None,
        closing_s: float = 10.0,
        earlier: EarlierSpools | None = None,
        on_open: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            connect,
            name=name,
            spool=spool,
            closing_s=closing_s,
            max_per_call=_METRICS_PER_BATCH,
            earlier=earlier,
            on_open=on_open,
        )

    @property
    def client(self) -> Any:
        """The ``mlflow.tracking.MlflowClient``; None until the run is open."""
        return None if self._connection is None else self._connection.client

    def log_metrics(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        time_s: float | None = None,
    ) -> None:
        """Send metrics of one step in the background.

        Args:
            metrics: Numbers by name; None is left out, NaN is kept. Names are sanitized.
            step: The step; None is 0.
            time_s: When they were measured, in seconds of ``time.time()``; None is now.

        Raises:
            RuntimeError: The run was closed.
            Exception: What MLflow raised for metrics sent earlier.
        """
        named = {sanitize_metric_name(name): value for name, value in metrics.items()}
        self._put(named, step, time_s)

    def log_params(self, params: Mapping[str, str]) -> None:
        """Send settings, waiting for them; values beyond 6000 characters are cut.

        Args:
            params: Settings by name, without secrets.

        Raises:
            Exception: What opening the run raised, or what MLflow raised, for example for a
                setting that already has another value.
        """
        send_params(self.open(), params)

    def _id_of(self, connection: MlflowConnection) -> str:
        return connection.run_id

    def _write(self, connection: MlflowConnection, entries: Sequence[StepMetrics]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), entry.time_ms, entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
            if connection.lacks(name, entry.step, float(value))
        ]
        if metrics:
            connection.writer.log_batch(connection.run_id, metrics=metrics)

    def _end(self, connection: MlflowConnection, status: str) -> None:
        connection.writer.set_terminated(connection.run_id, status)

    def _is_away(self, error: Exception) -> bool:
        return is_away(error) if self.is_open else not isinstance(error, (ImportError, ValueError))


def send_params(connection: MlflowConnection, params: Mapping[str, str]) -> None:
    """Send settings to a run, waiting for them."""
    from mlflow.entities import Param

    entities = [Param(key, value[:_MAX_PARAM_LENGTH]) for key, value in params.items()]
    for start in range(0, len(entities), _PARAMS_PER_BATCH):
        chunk = entities[start : start + _PARAMS_PER_BATCH]
        connection.client.log_batch(connection.run_id, params=chunk)


def _as_kept(value: float) -> float | str:
    """Return a value in the form in which MLflow keeps it, NaN as something equal to itself."""
    if math.isnan(value):
        return "nan"
    return max(-sys.float_info.max, min(sys.float_info.max, value))


def is_away(error: Exception) -> bool:
    """Return whether the same call may succeed later: no connection, or a server in trouble."""
    # MLflow reports a lost database connection as a bad request; SQLAlchemy's error tells.
    if getattr(error.__context__, "connection_invalidated", False):
        return True
    status = getattr(error, "get_http_status_code", None)
    if callable(status):
        code = int(status())
        return code >= 500 or code in _PASSING_STATUS
    return isinstance(error, OSError)


# The sanitizer would turn it into "throughput/tflops_device", which no dashboard knows.
RENAMED = {"throughput/tflops/device": "throughput/tflops_per_device"}

_REFUSED = re.compile(r"[^\w/.\- :]")
_LONGEST_NAME = 250


def mlflow_metric_name(name: str) -> str:
    """Return the name that a scalar of the training log has in MLflow.

    Args:
        name: The scalar's name, as other trackers and JSONL files have it.

    Returns:
        The sanitized name, and for the throughput of a device the one that dashboards know.

    Example:
        >>> mlflow_metric_name("throughput/tflops/device"), mlflow_metric_name("acc@5")
        ('throughput/tflops_per_device', 'acc_at_5')
    """
    return sanitize_metric_name(RENAMED.get(name, name))


def sanitize_metric_name(name: str) -> str:
    """Turn a metric's name into one that every MLflow store accepts.

    ``@`` becomes ``_at_``; of the slashes only the first one between two texts stays, runs
    counting as one, and others become ``_``, because a metric cannot be a folder of another one
    in file-like stores; all but letters, digits and ``_ / . - : space`` becomes ``_``, and so do
    two dots and more at the start. Names are cut after 250 characters; an empty one becomes ``_``.

    Args:
        name: The name.

    Returns:
        The name for MLflow.

    Example:
        >>> sanitize_metric_name("throughput//tflops/device")
        'throughput/tflops_device'
        >>> sanitize_metric_name("acc@5 (%)")
        'acc_at_5 ___'
    """
    return _sanitized(str(name))


@functools.lru_cache(maxsize=16384)
def _sanitized(name: str) -> str:
    head, _, tail = re.sub("/+", "/", name.replace("@", "_at_")).partition("/")
    tail = tail.replace("/", "_")
    text = f"{head}/{tail}" if head else f"_{tail}"
    head, _, tail = text[:_LONGEST_NAME].partition("/")
    return f"{_part(head)}/{_part(tail)}" if tail else _part(head)


def _part(text: str) -> str:
    clean = _REFUSED.sub("_", text)
    if clean == "." or clean.startswith(".."):
        dots = len(clean) - len(clean.lstrip("."))
        return "_" * dots + clean[dots:]
    return clean
