"""MLflow: runs that are opened from settings, and metrics handed to any MLflow client."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.settings.secrets import config_params, mask_secrets, without_secrets
from mcore.observe.sinks.base import Opening, ScalarRules, Tracker, accepts, plain_numbers
from mcore.observe.sinks.mlflow_http import TrackingServer, is_tracking_server
from mcore.observe.sinks.mlflow_run import (
    RENAMED,
    MlflowConnection,
    MlflowRun,
    sanitize_metric_name,
    send_params,
)

logger = logging.getLogger(__name__)

_DEFAULT_URI = "sqlite:///mlflow.db"


class MlflowSink:
    """Hands metrics to anything with ``log_metrics(dict, step=...)``, under sanitized names.

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
        """Log the metrics in one call, or more where sanitized names repeat."""
        for batch in _batches_of_unique_names(plain_numbers(metrics)):
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
            current folder.
        tags: Tags of the run.
        description: Note shown with the run.
        params: Settings to show with the run, without secrets, as of
            :func:`mcore.observe.config_params`.
        run_id: A run to continue instead of a new one.
        only_new_steps: When continuing a run, leave out metrics of steps that it already has.

    Returns:
        The run, open.

    Raises:
        ModuleNotFoundError: ``mlflow`` is not installed; names the extra.
        ValueError: The URI is a folder of files, which MLflow no longer maintains.
        Exception: What MLflow raised, without secrets: a RuntimeError where its text has any.

    Example:
        >>> run = open_mlflow("pretraining", "first", tracking_uri=uri)  # doctest: +SKIP
        >>> run.log_metrics({"lm loss": 2.5}, 1)  # doctest: +SKIP
        >>> run.close()  # doctest: +SKIP
    """
    connect = _Connect(
        experiment,
        run_name,
        uri=_checked_uri(tracking_uri),
        tags=tags,
        description=description,
        params=params,
        run_id=run_id,
        only_new_steps=only_new_steps,
    )
    run = MlflowRun(connect)
    run.open()
    return run


@dataclass
class _Connect:
    """Opens a run; what succeeded once is not repeated when it is called again."""

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

    def __post_init__(self) -> None:
        self._is_new = self.run_id is None

    def __call__(self) -> MlflowConnection:
        require_extra("mlflow", "mlflow_experiment")
        from mlflow.tracking import MlflowClient

        server = TrackingServer(self.uri) if is_tracking_server(self.uri) else None
        with without_secrets("MLflow"):
            client = MlflowClient(self.uri)
            if self._is_new and self.run_id is None:
                self.run_id = _create_run(
                    client, self.experiment, self.run_name, self.tags, self.description
                )
            run_id = str(self.run_id)
            connection = MlflowConnection(
                client,
                run_id,
                server=server,
                last_steps=_last_steps(client, run_id) if self.only_new_steps else {},
                known={} if self.resume_step is None else _known(client, run_id, self.resume_step),
            )
            if self.params:
                send_params(connection, self.params)
        return connection


def _checked_uri(tracking_uri: str | None) -> str:
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _DEFAULT_URI
    is_folder = uri.startswith("file:") or not (":" in uri or uri.startswith("databricks"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
        raise ValueError(
            f"the tracking URI {mask_secrets(uri)!r} is a folder of files, which MLflow no longer "
            f"maintains; give a server or a database such as {_DEFAULT_URI!r}"
        )
    return uri


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


def _batches_of_unique_names(metrics: Mapping[str, float]) -> Iterator[dict[str, float]]:
    batch: dict[str, float] = {}
    for name, value in metrics.items():
        clean = sanitize_metric_name(name)
        if clean in batch:
            yield batch
            batch = {}
        batch[clean] = value
    if batch:
        yield batch


def _known(client: Any, run_id: str, step: int) -> dict[str, dict[int, float]]:
    """Return what a run has after a step, by name and step; the latest value of each."""
    known: dict[str, dict[int, float]] = {}
    for name, last in _last_steps(client, run_id).items():
        if last > step:
            history = sorted(client.get_metric_history(run_id, name), key=lambda m: m.timestamp)
            known[name] = {metric.step: metric.value for metric in history if metric.step > step}
    return known


def _exists(client: Any, run_id: str) -> bool:
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
    uri = _checked_uri(settings.mlflow_tracking_uri)

    def connect() -> MlflowConnection:
        nonlocal continued
        require_extra("mlflow", "mlflow_experiment")
        with run.preparing():
            from mlflow.tracking import MlflowClient

            if uri.startswith("sqlite:"):
                MlflowClient(uri).search_experiments(max_results=1)  # makes a new database
        if is_tracking_server(uri):
            with without_secrets("MLflow"):
                TrackingServer(uri).check()
        if continued is not None:
            with without_secrets("MLflow"):
                client = MlflowClient(uri)
                if _exists(client, continued):
                    client.update_run(continued, status="RUNNING")
                else:
                    logger.warning("MLflow has no run %s any more: a new one is opened", continued)
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


def _release(client: Any) -> None:
    if isinstance(client, MlflowRun):
        client.release()


TRACKER = Tracker(
    attribute="mlflow_logger",
    label="MLflow",
    extra="mlflow",
    asked_by="mlflow_experiment",
    named_by="mlflow_run_name",
    settings=(
        "mlflow_experiment",
        "mlflow_run_name",
        "mlflow_tracking_uri",
        "mlflow_tags",
        "mlflow_description",
    ),
    open=_open,
    adapt=MlflowSink,
    module="mlflow.tracking",
    rules=ScalarRules(renamed=RENAMED),
    restart=_release,
    continues_at_restart=True,
)
