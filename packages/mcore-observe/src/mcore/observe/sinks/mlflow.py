"""MLflow: runs that are written in the background, and metrics for any MLflow client."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from typing import Any

from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks.base import ScalarRules, TrackerSpec, accepts
from mcore.observe.sinks.delivery.spool import StepMetrics
from mcore.observe.sinks.delivery.tracker_run import Opening, TrackerRun
from mcore.observe.sinks.scalars import plain_numbers
from mcore.observe.sinks.secrets import config_params, mask_secrets, without_secrets

logger = logging.getLogger(__name__)

DEFAULT_URI = "sqlite:///mlflow.db"
# The limits of MLflow's servers.
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_MAX_PARAM_LENGTH = 6000
_LONGEST_NAME = 250
_REFUSED = re.compile(r"[^\w/.\- :]")
# The sanitizer would turn it into "throughput/tflops_device", which no dashboard knows.
_RENAMED = {"throughput/tflops/device": "throughput/tflops_per_device"}
_TEMPORARY_STATUS = (408, 429)  # HTTP: Request Timeout, Too Many Requests
_RUNS = "/api/2.0/mlflow/runs"
_TIMEOUT_S = 30
_SHORT_TIMEOUT_S = 5


def mlflow_metric_name(name: str) -> str:
    """Return the name that a scalar of the training log has in MLflow.

    Args:
        name: The scalar's name in other trackers and JSONL files.

    Returns:
        The sanitized name, and for the throughput of a device the name that dashboards use.

    Example:
        >>> mlflow_metric_name("throughput/tflops/device"), mlflow_metric_name("acc@5")
        ('throughput/tflops_per_device', 'acc_at_5')
    """
    return sanitize_metric_name(_RENAMED.get(name, name))


def sanitize_metric_name(name: str) -> str:
    """Turn a metric's name into one that every MLflow store accepts.

    ``@`` becomes ``_at_``. Only the first slash between two texts stays, with successive slashes
    counted as one. Other slashes become ``_``, because in file-like stores a metric cannot be a
    folder of another one. All characters but letters, digits and ``_ / . - : space`` become
    ``_``, and so do two or more dots at the start. Names are cut after 250 characters. An empty
    name becomes ``_``.

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
    return _sanitize(name)


# Sinks call it without the function above: for a name in the cache that is the larger part.
@functools.lru_cache(maxsize=16384, typed=True)
def _sanitize(name: object) -> str:
    head, _, tail = re.sub("/+", "/", str(name).replace("@", "_at_")).partition("/")
    tail = tail.replace("/", "_")
    text = f"{head}/{tail}" if head else f"_{tail}"
    # Split a second time: the cut may have removed everything after the slash.
    head, _, tail = text[:_LONGEST_NAME].partition("/")
    return f"{_sanitize_part(head)}/{_sanitize_part(tail)}" if tail else _sanitize_part(head)


def _sanitize_part(text: str) -> str:
    clean = _REFUSED.sub("_", text)
    if clean == "." or clean.startswith(".."):  # paths such as ".." are refused
        dots = len(clean) - len(clean.lstrip("."))
        return "_" * dots + clean[dots:]
    return clean


class MlflowSink:
    """Passes metrics to anything with ``log_metrics(dict, step=...)``, under sanitized names.

    Args:
        client: A :class:`mcore.observe.sinks.MlflowRun`, or the ``mlflow`` module with a run open.

    Example:
        >>> class Client:
        ...     def log_metrics(self, metrics, step):
        ...         print(metrics, step)
        >>> MlflowSink(Client()).log({"acc@5": 0.5}, 1)
        {'acc_at_5': 0.5} 1
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics in one call, or in several if sanitized names repeat."""
        batch: dict[str, float] = {}
        for name, value in plain_numbers(metrics).items():
            clean = _sanitize(name)
            if clean in batch:
                self._client.log_metrics(batch, step=step)
                batch = {}
            batch[clean] = value
        if batch:
            self._client.log_metrics(batch, step=step)

    def flush(self) -> None:
        """Flush the client: its ``flush``, else MLflow's ``flush_async_logging``."""
        flush = getattr(self._client, "flush", None) or self._client.flush_async_logging
        flush()

    def close(self, status: str = "FINISHED") -> None:
        """Close the client with the run's status: its ``close``, else MLflow's ``end_run``."""
        close = getattr(self._client, "close", None) or self._client.end_run
        if status != "FINISHED" and accepts(close, "status"):
            close(status=status)
        else:
            close()


class TrackingServer:
    """Writes to runs of a tracking server, with the credentials that MLflow would use.

    MLflow's client retries each call for four minutes with pauses of up to two, and warns each
    time. Here a call that fails is an error immediately, and the caller decides on retries.

    Args:
        uri: Address of the server.

    Example:
        >>> TrackingServer("http://127.0.0.1:5000").check()  # doctest: +SKIP
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def check(self) -> None:
        """Send a small request, to learn within seconds whether the server responds.

        Raises:
            MlflowException: The server cannot be reached or refuses the request.
        """
        self._post("/api/2.0/mlflow/experiments/search", {"max_results": 1}, _SHORT_TIMEOUT_S)

    def log_batch(self, run_id: str, metrics: Sequence[Any]) -> None:
        """Write metrics.

        Args:
            run_id: The run.
            metrics: Up to 1000 ``mlflow.entities.Metric``. The same metric may be sent twice.

        Raises:
            MlflowException: The server cannot be reached or refuses the metrics.
        """
        entries = [
            {"key": m.key, "value": _spell_value(m.value), "timestamp": m.timestamp, "step": m.step}
            for m in metrics
        ]
        self._post(f"{_RUNS}/log-batch", {"run_id": run_id, "metrics": entries}, _TIMEOUT_S)

    def set_terminated(self, run_id: str, status: str) -> None:
        """End a run.

        Args:
            run_id: The run.
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.

        Raises:
            MlflowException: As :meth:`log_batch`.
        """
        end = {"run_id": run_id, "status": status, "end_time": int(time.time() * 1000)}
        self._post(f"{_RUNS}/update", end, _SHORT_TIMEOUT_S)

    def _post(self, endpoint: str, body: dict[str, Any], timeout_s: int) -> None:
        rest: Any = import_module("mlflow.utils.rest_utils")
        credentials: Any = import_module("mlflow.utils.credentials")
        response = rest.http_request(
            credentials.get_default_host_creds(self.uri),
            endpoint,
            "POST",
            max_retries=0,
            timeout=timeout_s,
            raise_on_status=False,
            json=body,
        )
        rest.verify_rest_response(response, endpoint)


def _spell_value(value: float) -> float | str:
    """Spell NaN and infinities, for which JSON has no number, as the server's parser does."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@dataclass(frozen=True)
class MlflowConnection:
    """A run that exists in MLflow, and the client that writes to it.

    Attributes:
        client: An ``mlflow.tracking.MlflowClient``.
        run_id: The run. It is written even if another run is active.
        server: A :class:`mcore.observe.sinks.TrackingServer` that writes metrics and ends the run
            instead of the client, or None.
        last_steps: The last step that the run has of each metric, by sanitized name. Metrics up
            to that step are not sent.
        known: Values that the run has, by sanitized name and step. An equal value is not sent. A
            different value is sent, and counts since it is the later one.

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
        """Return whether a value must be sent.

        Args:
            name: The metric, by its sanitized name.
            step: The step.
            value: The value.

        Returns:
            Whether it is after the last step and differs from the known value.

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
        """The server, else the client: it writes metrics and ends the run."""
        return self.client if self.server is None else self.server


def _as_kept(value: float) -> float | str:
    """Return a value as MLflow stores it. NaN becomes a text, since NaN is unequal to itself."""
    if math.isnan(value):
        return "nan"
    return max(-sys.float_info.max, min(sys.float_info.max, value))


class MlflowRun(TrackerRun[MlflowConnection]):
    """One run of an MLflow experiment, which accepts metrics before it is open.

    Metrics are sent in the background, the metrics of a second in one call, under sanitized names.
    A training step never waits for them. While the server or the database is unreachable, values
    are kept, after one WARNING, and sent once it responds: all values with a spool, else the last
    100000.

    The run is opened by :meth:`open`, or in the background while metrics wait in their order. A
    run that cannot be opened is one WARNING. It is retried until it succeeds, unless MLflow is
    not installed or the arguments are wrong.

    The end of the process ends the run, unless it has ended before: ``FINISHED``, ``FAILED``
    after an uncaught exception or ``sys.exit`` with an error code, ``KILLED`` after SIGTERM or
    SIGHUP. The first run of a process sets a handler for these signals, unless they have one, to
    let the process clean up.

    Args:
        connect: Opens the run: called when it is first needed, and after each failure. It may
            return the connection of another object that was released.
        name: The tracker's name in messages.
        spool: A file that keeps metrics until they arrive, or None.
        closing_s: Seconds that :meth:`close` waits for an unreachable tracker.
        earlier: Metrics that earlier starts of the run could not send. They are sent first.
        on_open: Called with the run's id once it is open.

    Attributes:
        status: The status that :meth:`close` gives the run if called without one.
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

    _label = "MLflow"
    max_per_call = _METRICS_PER_BATCH

    @property
    def client(self) -> Any:
        """The ``mlflow.tracking.MlflowClient``, None until the run is open."""
        return None if self._connection is None else self._connection.client

    def get_client(self) -> Any:
        """Return the ``mlflow.tracking.MlflowClient``, waiting until the run is open."""
        return self.open().client

    def log_params(self, params: Mapping[str, str]) -> None:
        """Send settings, waiting for them. Values are cut after 6000 characters.

        Names change as in :func:`sanitize_metric_name`. If two become equal, the last is sent.

        Args:
            params: Settings by name, without secrets.

        Raises:
            Exception: The run could not be opened, or MLflow refused the settings, for example a
                setting that already has another value.
        """
        _send_params(self.open(), params)

    def _rename(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        renamed: dict[str, Any] = {}
        for name, value in metrics.items():
            clean = _sanitize(name)
            if (first := self._given_names.setdefault(clean, name)) != name:
                text = "%r and %r are both %r in MLflow, which mixes them: rename one"
                warn_once(logger, text, first, name, clean)
            renamed[clean] = value
        return renamed

    def _get_run_id(self, connection: MlflowConnection) -> str:
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

    def _end_run(self, connection: MlflowConnection, status: str) -> None:
        connection.writer.set_terminated(connection.run_id, status)

    def _is_unreachable(self, error: Exception) -> bool:
        return is_unreachable(error)


def _send_params(connection: MlflowConnection, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    # MLflow refuses some names, and repeated names.
    named = {sanitize_metric_name(key): value[:_MAX_PARAM_LENGTH] for key, value in params.items()}
    entities = [Param(name, value) for name, value in named.items()]
    for start in range(0, len(entities), _PARAMS_PER_BATCH):
        connection.client.log_batch(connection.run_id, params=entities[start:][:_PARAMS_PER_BATCH])


def is_unreachable(error: Exception) -> bool:
    """Return whether the same call may succeed later: no connection, or a server in trouble."""
    # MLflow reports a lost database connection as a bad request. SQLAlchemy's error is its cause.
    if getattr(error.__context__, "connection_invalidated", False):
        return True
    status = getattr(error, "get_http_status_code", None)
    if callable(status):
        return (code := int(status())) >= 500 or code in _TEMPORARY_STATUS
    return isinstance(error, OSError)


def open_mlflow(
    experiment: str,
    run_name: str,
    *,
    tracking_uri: str | None = None,
    tags: Mapping[str, str] | None = None,
    description: str | None = None,
    params: Mapping[str, str] | None = None,
    run_id: str | None = None,
    only_new_steps: bool = False,
) -> MlflowRun:
    """Open a run in an MLflow experiment, which is created if it does not exist.

    Args:
        experiment: Name of the experiment.
        run_name: Name of the run.
        tracking_uri: Server or database. None uses MLFLOW_TRACKING_URI, else SQLite in the
            current folder.
        tags: Tags of the run.
        description: Note shown with the run.
        params: Settings to show with the run, without secrets, as from
            :func:`mcore.observe.config_params`.
        run_id: A run to continue instead of a new one.
        only_new_steps: When continuing a run, drop metrics of steps that it already has.

    Returns:
        The run, open.

    Raises:
        ModuleNotFoundError: ``mlflow`` is not installed. The message names the extra.
        ValueError: The URI is a folder of files, which MLflow no longer maintains.
        Exception: An error of MLflow. If its text has secrets, a RuntimeError without them.

    Example:
        >>> run = open_mlflow("pretraining", "first", tracking_uri=uri)  # doctest: +SKIP
        >>> run.log_metrics({"lm loss": 2.5}, 1)  # doctest: +SKIP
        >>> run.close()  # doctest: +SKIP
    """
    connect = _Connect(
        experiment,
        run_name,
        uri=_resolve_uri(tracking_uri),
        tags=tags,
        description=description,
        params=params,
        run_id=run_id,
        only_new_steps=only_new_steps,
    )
    run = MlflowRun(connect)
    run.open()
    return run


def _resolve_uri(tracking_uri: str | None) -> str:
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    is_folder = uri.startswith("file:") or not (":" in uri or uri.startswith("databricks"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
        raise ValueError(
            f"the tracking URI {mask_secrets(uri)!r} is a folder of files, which MLflow no longer "
            f"maintains; give a server or a database such as {DEFAULT_URI!r}"
        )
    return uri


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


@dataclass
class _Connect:
    """Opens a run. A second call does not repeat the parts that have succeeded."""

    experiment: str
    run_name: str
    _: KW_ONLY
    uri: str
    tags: Mapping[str, str] | None = None
    description: str | None = None
    params: Mapping[str, str] | None = None
    run_id: str | None = None
    only_new_steps: bool = False
    resume_step: int | None = None

    def __call__(self) -> MlflowConnection:
        TRACKER.require()
        from mlflow.tracking import MlflowClient

        with without_secrets(TRACKER.label):
            client = MlflowClient(self.uri)
            if self.run_id is None:
                found = client.get_experiment_by_name(self.experiment)
                tags = dict(self.tags or {})
                if self.description is not None:
                    tags["mlflow.note.content"] = self.description
                run = client.create_run(
                    found.experiment_id if found else client.create_experiment(self.experiment),
                    tags=tags,
                    run_name=self.run_name,
                )
                self.run_id = str(run.info.run_id)
            last_steps = {}
            if self.only_new_steps or self.resume_step is not None:
                found_metrics = client.get_run(self.run_id).to_proto().data.metrics
                last_steps = {metric.key: metric.step for metric in found_metrics}
            known: dict[str, dict[int, float]] = {}  # after the resumed step, the latest values
            after = self.resume_step
            for name, last in last_steps.items():
                if after is not None and last > after:
                    # A later value of the same step replaces an earlier one in the dictionary.
                    history = client.get_metric_history(self.run_id, name)
                    known[name] = {
                        metric.step: metric.value
                        for metric in sorted(history, key=lambda metric: metric.timestamp)
                        if metric.step > after
                    }
            connection = MlflowConnection(
                client,
                self.run_id,
                server=TrackingServer(self.uri) if _is_server(self.uri) else None,
                last_steps=last_steps if self.only_new_steps else {},
                known=known,
            )
            _send_params(connection, self.params or {})
        return connection


def _is_active(client: Any, run_id: str) -> bool:
    """Return whether a run exists and was not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        stage: str = client.get_run(run_id).info.lifecycle_stage
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return stage == "active"


def _open(opening: Opening) -> MlflowRun:
    settings = opening.settings
    params = config_params(opening.config)
    continued = opening.run_id or getattr(settings, "mlflow_run_id", None)
    uri = _resolve_uri(settings.mlflow_tracking_uri)

    def connect() -> MlflowConnection:
        nonlocal continued
        TRACKER.require()
        with run.preparing():
            from mlflow.tracking import MlflowClient

            if uri.startswith("sqlite:"):
                MlflowClient(uri).search_experiments(max_results=1)  # makes a new database
        with without_secrets(TRACKER.label):
            if _is_server(uri):
                TrackingServer(uri).check()
            if continued is not None:
                client = MlflowClient(uri)
                if _is_active(client, continued):
                    client.update_run(continued, status="RUNNING")
                else:
                    logger.warning("MLflow has no run %s any more: opening a new one", continued)
                    continued = None
        opener.run_id = opener.run_id or continued
        opener.params = None if continued else params
        opener.resume_step = opening.resume_step if continued else None
        return opener()

    opener = _Connect(
        settings.mlflow_experiment,
        settings.mlflow_run_name,
        uri=uri,
        tags=settings.mlflow_tags,
        description=settings.mlflow_description,
    )
    run = MlflowRun(connect, **opening.options())
    run.open_in_background()
    return run


TRACKER = TrackerSpec(
    name="mlflow",
    label="MLflow",
    module="mlflow.tracking",
    wanted_by="mlflow_experiment",
    named_by="mlflow_run_name",
    other_settings=("mlflow_tracking_uri", "mlflow_tags", "mlflow_description"),
    open=_open,
    adapt=MlflowSink,
    rules=ScalarRules(renamed=_RENAMED),
    restart=lambda client: client.release() if isinstance(client, MlflowRun) else None,
    continues_at_restart=True,
)
