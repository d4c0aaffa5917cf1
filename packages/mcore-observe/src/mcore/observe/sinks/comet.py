"""Comet experiments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.secret_texts import without_secrets
from mcore.observe.sinks.plain_numbers import plain_numbers

__all__ = ["CometSink", "open_comet"]


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


def open_comet(
    project: str,
    name: str,
    *,
    workspace: str | None = None,
    api_key: str | None = None,
    tags: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Open a Comet experiment that takes no metrics and settings but those it is given.

    Args:
        project: The project.
        name: Name of the experiment.
        workspace: The workspace; None leaves that to the client.
        api_key: The key; None takes COMET_API_KEY. Blanks around it are removed, and the
            environment is not changed. Without a key, and with Comet's own COMET_OFFLINE_DIRECTORY
            set, the experiment is written there, as an archive to upload later.
        tags: Tags of the experiment.
        config: Settings to show with the experiment, without secrets.

    Returns:
        The experiment.

    Raises:
        ModuleNotFoundError: ``comet_ml`` is not installed; names the extra.
        Exception: What Comet raised, without secrets: as RuntimeError where its text has any.
    """
    require_extra("comet", "comet_project")
    import comet_ml

    key = (api_key or os.environ.get("COMET_API_KEY", "")).strip() or None
    settings: dict[str, Any] = {
        "project_name": project,
        "workspace": workspace,
        "auto_metric_logging": False,
        # The command line may have secrets; the configuration is logged without them.
        "auto_param_logging": False,
        "parse_args": False,
    }
    make: Callable[..., Any]
    with without_secrets("Comet", [key] if key else []):
        folder = os.environ.get("COMET_OFFLINE_DIRECTORY")
        if key is None and folder:
            make = functools.partial(comet_ml.OfflineExperiment, offline_directory=folder)
        else:
            make = functools.partial(comet_ml.Experiment, api_key=key)
        experiment = make(**settings)
        experiment.set_name(name)
        if tags:
            experiment.add_tags(list(tags))
        if config:
            experiment.log_parameters(dict(config))
    return experiment
