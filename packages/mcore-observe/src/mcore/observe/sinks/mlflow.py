"""MLflow: runs that are opened from settings, and metrics handed to any MLflow client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.secrets import config_params, mask_secrets, without_secrets
from mcore.observe.sinks.base import ScalarRules, Tracker, plain_numbers
from mcore.observe.sinks.mlflow_http import TrackingServer, is_tracking_server
from mcore.observe.sinks.mlflow_run import (
    RENAMED,
    MlflowConnection,
    MlflowRun,
    sanitize_metric_name,
)

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

    def close(self) -> None:
        """Close the client: its ``close``, else MLflow's ``end_run``."""
        close = getattr(self._client, "close", None) or self._client.end_run
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
    require_extra("mlflow", "mlflow_experiment")
    from mlflow.tracking import MlflowClient

    uri = _checked_uri(tracking_uri)
    with without_secrets("MLflow"):
        client = MlflowClient(uri)
        if run_id is None:
            run_id = _create_run(client, experiment, run_name, tags, description)
        connection = MlflowConnection(
            client,
            run_id,
            server=TrackingServer(uri) if is_tracking_server(uri) else None,
            last_steps=_last_steps(client, run_id) if only_new_steps else {},
        )
        run = MlflowRun(lambda: connection)
        run.open()
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


def _open(settings: Any, config: Any, earlier_run_id: str | None) -> MlflowRun:
    return open_mlflow(
        settings.mlflow_experiment,
        settings.mlflow_run_name,
        tracking_uri=settings.mlflow_tracking_uri,
        tags=settings.mlflow_tags,
        description=settings.mlflow_description,
        params=None if earlier_run_id else config_params(config),
        run_id=earlier_run_id,
    )


def _release(client: Any) -> None:
    if isinstance(client, MlflowRun):
        client.release()


def _end_as(client: Any, status: str) -> None:
    if isinstance(client, MlflowRun):
        client.status = status


TRACKER = Tracker(
    attribute="mlflow_logger",
    label="MLflow",
    extra="mlflow",
    asked_by="mlflow_experiment",
    named_by="mlflow_run_name",
    open=_open,
    adapt=MlflowSink,
    rules=ScalarRules(renamed=RENAMED),
    restart=_release,
    end_as=_end_as,
)
