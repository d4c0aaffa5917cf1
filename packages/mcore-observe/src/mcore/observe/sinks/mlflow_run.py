"""An MLflow run that is written in the background and ends with the right status."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mcore.observe.background_calls import BackgroundCalls
from mcore.observe.extras import require_extra
from mcore.observe.process_end import on_process_end

__all__ = ["MlflowRun", "open_mlflow"]

_DEFAULT_URI = "sqlite:///mlflow.db"
_MAX_WAITING = 64
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_MAX_PARAM_LENGTH = 6000

_Item = TypeVar("_Item")


class MlflowRun:
    """One run of an MLflow experiment.

    Metrics are sent in the background; at most 64 batches wait, then the caller does. The run
    ends when the process does, if not before: ``FINISHED``, ``FAILED`` after an uncaught
    exception, ``KILLED`` after SIGTERM (see :mod:`mcore.observe.process_end`).

    Args:
        client: An ``mlflow.tracking.MlflowClient``.
        run_id: The run, which stays the one that is written whatever other run is active.

    Attributes:
        status: The status that :meth:`close` gives the run when it is told none.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.status = "FINISHED"
        self._calls = BackgroundCalls(_MAX_WAITING)
        self._ended = False
        self._stop_watching = on_process_end(self.close)

    def log_metrics(self, metrics: Mapping[str, float | None], step: int | None = None) -> None:
        """Send metrics of one step in the background.

        Args:
            metrics: Numbers by name; None is left out, NaN is kept.
            step: The step; None is 0.

        Raises:
            Exception: What MLflow raised for a batch sent earlier.
        """
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entities = [
            Metric(name, float(value), now_ms, step or 0)
            for name, value in metrics.items()
            if value is not None
        ]
        for chunk in _chunks(entities, _METRICS_PER_BATCH):
            self._calls.put(functools.partial(self.client.log_batch, self.run_id, metrics=chunk))

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
        """Wait until all metrics have arrived.

        Raises:
            Exception: The first error of a batch, after all were waited for.
        """
        self._calls.drain()

    def release(self) -> None:
        """Flush and let go of the run without ending it; another object may continue it."""
        self._ended = True
        self._stop_watching()
        self._calls.close()

    def close(self, status: str | None = None) -> None:
        """Flush and end the run; closing twice is fine, and the first status stays.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``; None is :attr:`status`.

        Raises:
            Exception: A batch that did not arrive; the run is ended all the same.
        """
        if self._ended:
            return
        self._ended = True
        self._stop_watching()
        try:
            self._calls.close()
        finally:
            self.client.set_terminated(self.run_id, status or self.status)


def open_mlflow(
    experiment: str,
    run_name: str,
    *,
    tracking_uri: str | None = None,
    tags: Mapping[str, str] | None = None,
    description: str | None = None,
    params: Mapping[str, str] | None = None,
    run_id: str | None = None,
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

    Returns:
        The run.

    Raises:
        ModuleNotFoundError: ``mlflow`` is not installed; names the extra.
        ValueError: The URI is a folder of files, which MLflow no longer maintains.
    """
    require_extra("mlflow", "mlflow_experiment")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(_checked_uri(tracking_uri))
    if run_id is None:
        run_id = _create_run(client, experiment, run_name, tags, description)
    run = MlflowRun(client, run_id)
    if params:
        run.log_params(params)
    return run


def _checked_uri(tracking_uri: str | None) -> str:
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _DEFAULT_URI
    is_folder = uri.startswith("file:") or not (":" in uri or uri.startswith("databricks"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
        raise ValueError(
            f"the tracking URI {uri!r} is a folder of files, which MLflow no longer maintains; "
            f"give a server or a database such as {_DEFAULT_URI!r}"
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


def _chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
