"""An MLflow run that is written in the background and ends with the right status."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mcore.observe.extras import require_extra
from mcore.observe.metric_sender import MetricSender, StepMetrics
from mcore.observe.process_end import on_process_end
from mcore.observe.secret_texts import mask_secrets, without_secrets
from mcore.observe.sinks.mlflow import sanitize_metric_name
from mcore.observe.sinks.mlflow_http import TrackingServer, is_tracking_server
from mcore.observe.sinks.plain_numbers import plain_numbers

__all__ = ["MlflowRun", "open_mlflow"]

logger = logging.getLogger(__name__)

_DEFAULT_URI = "sqlite:///mlflow.db"
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_MAX_PARAM_LENGTH = 6000
# What HTTP calls too many requests, and a request that took too long.
_PASSING_STATUS = (408, 429)

_Item = TypeVar("_Item")


class MlflowRun:
    """One run of an MLflow experiment.

    Metrics are sent in the background, those of a second in one call, and a training step does
    not wait for them. While the server or the database is away, the last 100000 values are kept,
    the oldest being dropped first, and sent when it is back; that is one WARNING. Only where
    100000 values wait for a tracker that still answers does the caller wait for room.

    The run ends when the process does, if not before: ``FINISHED``, ``FAILED`` after an uncaught
    exception, ``KILLED`` after SIGTERM (see :mod:`mcore.observe.process_end`).

    Args:
        client: An ``mlflow.tracking.MlflowClient``.
        run_id: The run, which stays the one that is written whatever other run is active.
        server: What writes metrics and ends the run, where it is not the client: a
            :class:`mcore.observe.sinks.mlflow_http.TrackingServer`.
        last_steps: The last step of metrics that the run has already, by sanitized name; what is
            logged again up to there is left out.
        name: What messages call the tracker.

    Attributes:
        status: The status that :meth:`close` gives the run when it is told none.
        closing_s: Seconds that :meth:`close` waits for a tracker that is away.
        num_logged: Values that were logged.
    """

    def __init__(
        self,
        client: Any,
        run_id: str,
        *,
        server: Any = None,
        last_steps: Mapping[str, int] | None = None,
        name: str = "MLflow",
    ) -> None:
        self.client = client
        self.run_id = run_id
        self.status = "FINISHED"
        self.closing_s = 30.0
        self._writer = client if server is None else server
        self.last_steps = dict(last_steps or {})
        self._name = name
        self.num_logged = 0
        self._num_settled = 0
        self._sender = MetricSender(
            name, self._send, is_away=self._is_away, max_per_call=_METRICS_PER_BATCH
        )
        self._ended = False
        self._ending = threading.RLock()
        self._stop_watching = on_process_end(self.close)

    @property
    def num_missing(self) -> int:
        """Values that were logged and that MLflow has not taken, or not yet."""
        return self.num_logged - self._num_settled

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
            Exception: What MLflow raised, for a setting that has another value already, say.
        """
        from mlflow.entities import Param

        entities = [Param(key, value[:_MAX_PARAM_LENGTH]) for key, value in params.items()]
        for chunk in _chunks(entities, _PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=chunk)

    def flush(self) -> None:
        """Wait until all metrics have arrived, or until MLflow is found to be away.

        Raises:
            Exception: The first error of a batch, after all were waited for.
        """
        self._sender.flush()

    def release(self) -> None:
        """Flush and let go of the run without ending it; another object may continue it."""
        self._ended = True
        self._stop_watching()
        self._sender.close(self.closing_s)

    def close(self, status: str | None = None) -> None:
        """Flush and end the run; closing twice is fine, and the first status stays.

        A tracker that is away is waited for, :attr:`closing_s` at most.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``; None is :attr:`status`.

        Raises:
            Exception: A batch that did not arrive; the run is ended all the same.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
            self._stop_watching()
            try:
                self._sender.close(self.closing_s)
            finally:
                self._end(status or self.status)

    def _send(self, entries: Sequence[StepMetrics]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), entry.time_ms, entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
            if entry.step > self.last_steps.get(name, entry.step - 1)
        ]
        if metrics:
            self._writer.log_batch(self.run_id, metrics=metrics)
        self._num_settled += sum(len(entry.metrics) for entry in entries)

    def _is_away(self, error: Exception) -> bool:
        return _is_away(error)

    def _end(self, status: str) -> None:
        try:
            self._writer.set_terminated(self.run_id, status)
        except Exception as error:
            if not _is_away(error):
                raise
            logger.error(
                "%s is away and shows the run %s as running: %s",
                self._name,
                self.run_id,
                mask_secrets(str(error)),
            )


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
    """Open a run in an MLflow experiment, making the experiment if there is none.

    Args:
        experiment: Name of the experiment.
        run_name: Name of the run.
        tracking_uri: Server or database; None takes MLFLOW_TRACKING_URI, else SQLite in the
            present folder.
        tags: Tags of the run.
        description: Note shown with the run.
        params: Settings to show with the run, without secrets.
        run_id: A run to continue instead of a new one.
        only_new_steps: Of a run to continue, leave out metrics of steps that it has already.

    Returns:
        The run.

    Raises:
        ModuleNotFoundError: ``mlflow`` is not installed; names the extra.
        ValueError: The URI is a folder of files, which MLflow no longer maintains.
        Exception: What MLflow raised, without secrets: as RuntimeError where its text has any.
    """
    require_extra("mlflow", "mlflow_experiment")
    from mlflow.tracking import MlflowClient

    uri = _checked_uri(tracking_uri)
    with without_secrets("MLflow"):
        client = MlflowClient(uri)
        if run_id is None:
            run_id = _create_run(client, experiment, run_name, tags, description)
        run = MlflowRun(
            client,
            run_id,
            server=TrackingServer(uri) if is_tracking_server(uri) else None,
            last_steps=_last_steps(client, run_id) if only_new_steps else None,
        )
        if params:
            run.log_params(params)
    return run


def _checked_uri(tracking_uri: str | None) -> str:
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _DEFAULT_URI
    is_folder = uri.startswith("file:") or not (":" in uri or uri.startswith("databricks"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
        raise ValueError(
            f"the tracking URI {mask_secrets(uri)!r} is a folder of files, which MLflow no longer "
            f"maintains; give a server or a database such as {_DEFAULT_URI!r}"
        )
    return uri


def _is_away(error: Exception) -> bool:
    """Whether the same call may succeed later: no connection, or a server that cannot now."""
    # MLflow calls a database that hung up a bad request; SQLAlchemy, whose error it was, knows.
    if getattr(error.__context__, "connection_invalidated", False):
        return True
    status = getattr(error, "get_http_status_code", None)
    if callable(status):
        code = int(status())
        return code >= 500 or code in _PASSING_STATUS
    return isinstance(error, OSError)


def _create_run(
    client: Any,
    experiment: str,
    run_name: str,
    tags: Mapping[str, str] | None,
    description: str | None,
) -> str:
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found else client.create_experiment(experiment)
    all_tags = dict(tags or {})
    if description is not None:
        all_tags["mlflow.note.content"] = description
    run = client.create_run(experiment_id, tags=all_tags, run_name=run_name)
    run_id: str = run.info.run_id
    return run_id


def _last_steps(client: Any, run_id: str) -> dict[str, int]:
    return {metric.key: metric.step for metric in client.get_run(run_id).to_proto().data.metrics}


def _chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
