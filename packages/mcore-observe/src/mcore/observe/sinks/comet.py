"""Comet experiments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from mcore.observe.secrets import config_params, without_secrets
from mcore.observe.sinks.base import Tracker, plain_numbers


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
        self._experiment.log_metrics(plain_numbers(metrics), step=step)

    def flush(self) -> None:
        """Wait until the metrics are sent."""
        self._experiment.flush()

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()


def _open(settings: Any, config: Any, earlier_run_id: str | None) -> Any:
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
        params = config_params(config)
        if params:
            experiment.log_parameters(params)
    return experiment


TRACKER = Tracker(
    attribute="comet_logger",
    label="Comet",
    extra="comet",
    asked_by="comet_project",
    named_by="comet_experiment_name",
    open=_open,
    adapt=CometSink,
)
