"""Comet experiments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.settings.secrets import config_params, without_secrets
from mcore.observe.sinks.background import BackgroundRun, ClientRun
from mcore.observe.sinks.base import Opening, Tracker, plain_numbers
from mcore.observe.sinks.spool import StepMetrics


class CometSink:
    """Hands metrics to anything with ``log_metrics(dict, step=...)``, one call for each step.

    Args:
        experiment: A Comet experiment.

    Example:
        >>> class Experiment:
        ...     def log_metrics(self, metrics, step):
        ...         print(metrics, step)
        >>> CometSink(Experiment()).log({"lm loss": 2.5}, 1)
        {'lm loss': 2.5} 1
    """

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics in one call."""
        if isinstance(self._experiment, BackgroundRun):
            self._experiment.log_metrics(metrics, step)
        else:
            self._experiment.log_metrics(plain_numbers(metrics), step=step)

    def flush(self) -> None:
        """Wait until the metrics are sent."""
        self._experiment.flush()

    def close(self, status: str = "FINISHED") -> None:
        """End the experiment; another status than ``"FINISHED"`` is logged with it."""
        if isinstance(self._experiment, BackgroundRun):
            self._experiment.close(status)
        else:
            _end(self._experiment, status)


class CometRun(ClientRun[Any]):
    """A Comet experiment that is opened in the background; metrics wait for it."""

    def end(self) -> None:
        """End the experiment."""
        self.close()

    def _id_of(self, connection: Any) -> str:
        return str(connection.get_key()) if hasattr(connection, "get_key") else ""

    def _write(self, connection: Any, entries: Sequence[StepMetrics]) -> None:
        for entry in entries:
            connection.log_metrics(dict(entry.metrics), step=entry.step)

    def _end(self, connection: Any, status: str) -> None:
        _end(connection, status)


def _end(experiment: Any, status: str) -> None:
    if status != "FINISHED":
        experiment.log_other("status", status)
    experiment.end()


def _open(opening: Opening) -> CometRun:
    params = config_params(opening.config)

    def connect() -> Any:
        require_extra("comet", "comet_project")
        with run.preparing():
            import comet_ml  # noqa: F401

        return _connect(opening.settings, params)

    run = CometRun(connect, name="Comet", **opening.options())
    run.open_in_background()
    return run


def _connect(settings: Any, params: Mapping[str, str]) -> Any:
    """Open an experiment that records only the metrics and settings it is given.

    Without a key it is written to Comet's own COMET_OFFLINE_DIRECTORY where that is set.
    """
    import comet_ml

    key = (settings.comet_api_key or os.environ.get("COMET_API_KEY", "")).strip() or None
    folder = os.environ.get("COMET_OFFLINE_DIRECTORY")
    make: Callable[..., Any]
    with without_secrets("Comet", [key] if key else []):
        if key is None and folder:
            make = functools.partial(comet_ml.OfflineExperiment, offline_directory=folder)
        else:
            make = functools.partial(comet_ml.Experiment, api_key=key)
        experiment = make(
            project_name=settings.comet_project,
            workspace=settings.comet_workspace,
            auto_metric_logging=False,
            # The command line may contain secrets; the configuration is logged without them.
            auto_param_logging=False,
            parse_args=False,
        )
        experiment.set_name(settings.comet_experiment_name)
        if settings.comet_tags:
            experiment.add_tags(list(settings.comet_tags))
        if params:
            experiment.log_parameters(dict(params))
    return experiment


TRACKER = Tracker(
    attribute="comet_logger",
    label="Comet",
    extra="comet",
    asked_by="comet_project",
    named_by="comet_experiment_name",
    settings=("comet_project", "comet_experiment_name", "comet_workspace", "comet_tags"),
    open=_open,
    adapt=CometSink,
    module="comet_ml",
)
