"""Comet: experiments that are written in the background."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from mcore.observe.sinks.base import TrackerSpec
from mcore.observe.sinks.delivery.spool import StepMetrics
from mcore.observe.sinks.delivery.tracker_run import ClientRun, Opening, TrackerRun
from mcore.observe.sinks.scalars import plain_numbers
from mcore.observe.sinks.secrets import config_params, without_secrets


class CometSink:
    """Passes metrics to anything with ``log_metrics(dict, step=...)``, one call for each step.

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
        if isinstance(self._experiment, TrackerRun):
            self._experiment.log_metrics(metrics, step)
        else:
            self._experiment.log_metrics(plain_numbers(metrics), step=step)

    def flush(self) -> None:
        """Wait until the metrics are sent."""
        self._experiment.flush()

    def close(self, status: str = "FINISHED") -> None:
        """End the experiment. A status other than ``"FINISHED"`` is logged with it."""
        if isinstance(self._experiment, TrackerRun):
            self._experiment.close(status)
        else:
            _end(self._experiment, status)


class CometRun(ClientRun[Any]):
    """A Comet experiment that is opened in the background. Metrics wait for it."""

    def end(self) -> None:
        """End the experiment."""
        self.close()

    def _get_run_id(self, connection: Any) -> str:
        return str(connection.get_key()) if hasattr(connection, "get_key") else ""

    def _write(self, connection: Any, entries: Sequence[StepMetrics]) -> None:
        for entry in entries:
            connection.log_metrics(dict(entry.metrics), step=entry.step)

    def _end_run(self, connection: Any, status: str) -> None:
        _end(connection, status)


def _end(experiment: Any, status: str) -> None:
    if status != "FINISHED":
        experiment.log_other("status", status)
    experiment.end()


def _open(opening: Opening) -> CometRun:
    params = config_params(opening.config)

    def connect() -> Any:
        TRACKER.require()
        with run.preparing():
            import comet_ml
        settings = opening.settings
        key = (settings.comet_api_key or os.environ.get("COMET_API_KEY", "")).strip() or None
        folder = os.environ.get("COMET_OFFLINE_DIRECTORY")
        make: Callable[..., Any]
        with without_secrets(TRACKER.label, [key] if key else []):
            if key is None and folder:
                make = functools.partial(comet_ml.OfflineExperiment, offline_directory=folder)
            else:
                make = functools.partial(comet_ml.Experiment, api_key=key)
            # Without a setting it records only the metrics and parameters it is given. Code, output
            # and the command line may contain secrets. The parameters below are masked.
            code, console, environment = (
                bool(getattr(settings, f"comet_log_{part}", False))
                for part in ("code", "console", "environment")
            )
            experiment = make(
                project_name=settings.comet_project,
                workspace=settings.comet_workspace,
                auto_metric_logging=False,
                auto_param_logging=False,
                parse_args=False,
                log_code=code,
                log_git_patch=code,
                log_git_metadata=environment,
                log_env_details=environment,
                auto_output_logging="simple" if console else cast("Any", False),
            )
            experiment.set_name(settings.comet_experiment_name)
            if settings.comet_tags:
                experiment.add_tags(list(settings.comet_tags))
            if params:
                experiment.log_parameters(dict(params))
        return experiment

    run = CometRun(connect, name=TRACKER.label, **opening.options())
    run.open_in_background()
    return run


TRACKER = TrackerSpec(
    name="comet",
    label="Comet",
    module="comet_ml",
    wanted_by="comet_project",
    named_by="comet_experiment_name",
    other_settings=(
        "comet_workspace",
        "comet_tags",
        "comet_log_code",
        "comet_log_console",
        "comet_log_environment",
    ),
    open=_open,
    adapt=CometSink,
)
