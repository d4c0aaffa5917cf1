"""An MLflow run that is connected to when it is needed, and written in the background."""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore.observe.process_end import on_process_end
from mcore.observe.secrets import mask_secrets
from mcore.observe.sinks.base import plain_numbers
from mcore.observe.sinks.sender import MetricSender, StepMetrics

logger = logging.getLogger(__name__)

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

    Example:
        >>> MlflowConnection(None, "r1", last_steps={"lm loss": 10}).last_steps
        {'lm loss': 10}
    """

    client: Any
    run_id: str
    server: Any = None
    last_steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def writer(self) -> Any:
        """What writes metrics and ends the run: the server, else the client."""
        return self.client if self.server is None else self.server


class MlflowRun:
    """One run of an MLflow experiment, which may be logged to before it is open.

    Metrics are sent in the background, those of a second in one call, and a training step does
    not wait for them. While the server or the database is away, the last 100000 values are kept,
    the oldest being dropped first, and sent when it is back; that is one WARNING. Only where
    100000 values wait for a tracker that still answers does the caller wait for room.

    The run is opened by :meth:`open`, or in the background, where metrics wait for it in their
    order: a run that cannot be opened is one WARNING, and is retried until it can, unless
    MLflow is not installed or the arguments are wrong.

    It ends when the process does, if not before: ``FINISHED``, ``FAILED`` after an uncaught
    exception, ``KILLED`` after SIGTERM. The first run of a process gives SIGTERM a handler, unless
    it has one, so that the process can clean up.

    Args:
        connect: Opens the run: called when it is first needed, and again after it failed. It may
            hand on the connection of another object that was released.
        name: What messages call the tracker.

    Attributes:
        status: The status that :meth:`close` gives the run when given none.
        closing_s: Seconds that :meth:`close` waits for a tracker that is away.
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

    def __init__(self, connect: Callable[[], MlflowConnection], *, name: str = "MLflow") -> None:
        self.status = "FINISHED"
        self.closing_s = 30.0
        self.num_logged = 0
        self._num_settled = 0
        self._name = name
        self._connect = connect
        self._connection: MlflowConnection | None = None
        self._connecting = threading.Lock()
        self._first_attempt: threading.Thread | None = None
        self._first_error: Exception | None = None
        self._sender = MetricSender(
            name, self._send, is_away=self._is_away, max_per_call=_METRICS_PER_BATCH
        )
        self._ended = False
        self._ending = threading.RLock()
        self._stop_watching = on_process_end(self.close)

    @property
    def is_open(self) -> bool:
        """Whether the run has been opened."""
        return self._connection is not None

    @property
    def run_id(self) -> str:
        """The run; empty until it is open."""
        return "" if self._connection is None else self._connection.run_id

    @property
    def client(self) -> Any:
        """The ``mlflow.tracking.MlflowClient``; None until the run is open."""
        return None if self._connection is None else self._connection.client

    @property
    def num_missing(self) -> int:
        """Values that were logged and that MLflow has not taken, or not yet."""
        return self.num_logged - self._num_settled

    def open(self) -> MlflowConnection:
        """Open the run unless it is open.

        Returns:
            The connection.

        Raises:
            Exception: Whatever prevents that.
        """
        with self._connecting:
            error, self._first_error = self._first_error, None
            if error is not None:
                raise error
            if self._connection is None:
                self._connection = self._connect()
            return self._connection

    def open_in_background(self) -> None:
        """Start opening the run, so that nobody waits for the import of MLflow or for a server."""
        self._first_attempt = threading.Thread(
            target=self._try_to_open, name=f"mcore.observe opens {self._name}", daemon=True
        )
        self._first_attempt.start()

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
        if self._ended:
            raise RuntimeError(f"the MLflow run {self.run_id} was closed; open it again to log")
        named = {sanitize_metric_name(n): value for n, value in plain_numbers(metrics).items()}
        self.num_logged += len(named)
        at_s = time.time() if time_s is None else time_s
        self._sender.put(StepMetrics(named, int(step or 0), int(at_s * 1000)))

    def log_params(self, params: Mapping[str, str]) -> None:
        """Send settings, waiting for them; values beyond 6000 characters are cut.

        Args:
            params: Settings by name, without secrets.

        Raises:
            Exception: What opening the run raised, or what MLflow raised, for example for a
                setting that already has another value.
        """
        from mlflow.entities import Param

        connection = self.open()
        entities = [Param(key, value[:_MAX_PARAM_LENGTH]) for key, value in params.items()]
        for start in range(0, len(entities), _PARAMS_PER_BATCH):
            chunk = entities[start : start + _PARAMS_PER_BATCH]
            connection.client.log_batch(connection.run_id, params=chunk)

    def flush(self) -> None:
        """Wait until all metrics have arrived, or until MLflow is found to be away.

        It does not wait for the run to be opened.

        Raises:
            Exception: The first error of a batch, after waiting for all.
        """
        if self.is_open:
            self._sender.flush()

    def release(self) -> None:
        """Flush and release the run without ending it; another object may continue it."""
        self._ended = True
        self._stop_watching()
        self._sender.close(self.closing_s)

    def close(self, status: str | None = None) -> None:
        """Flush and end the run; closing twice is fine, and the first status stays.

        A tracker that is away is waited for, and so is a run that is being opened,
        :attr:`closing_s` at most.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``; None is :attr:`status`.

        Raises:
            Exception: A batch that did not arrive, or why the run could not be opened; the run is
                still ended.
        """
        with self._ending:
            if self._ended:
                return
            deadline_s = time.monotonic() + self.closing_s
            if self._first_attempt is not None:
                self._first_attempt.join(self.closing_s)
            self._ended = True
            self._stop_watching()
            try:
                self._sender.close(max(0.0, deadline_s - time.monotonic()))
            finally:
                self._end(status or self.status)

    def _try_to_open(self) -> None:
        try:
            self.open()
        except Exception as error:
            self._first_error = error  # the sender's thread raises it, and its caller is warned

    def _send(self, entries: Sequence[StepMetrics]) -> None:
        connection = self.open()
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), entry.time_ms, entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
            if entry.step > connection.last_steps.get(name, entry.step - 1)
        ]
        if metrics:
            connection.writer.log_batch(connection.run_id, metrics=metrics)
        self._num_settled += sum(len(entry.metrics) for entry in entries)

    def _is_away(self, error: Exception) -> bool:
        return is_away(error) if self.is_open else not isinstance(error, (ImportError, ValueError))

    def _end(self, status: str) -> None:
        if self._connection is None:
            return
        try:
            self._connection.writer.set_terminated(self.run_id, status)
        except Exception as error:
            if not is_away(error):
                raise
            logger.error(
                "%s is away and shows the run %s as running: %s",
                self._name,
                self.run_id,
                mask_secrets(str(error)),
            )


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
