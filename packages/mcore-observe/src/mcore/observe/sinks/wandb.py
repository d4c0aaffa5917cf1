"""Weights & Biases runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore.observe.secrets import config_params, without_secrets
from mcore.observe.sinks.base import Tracker, plain_numbers


class WandbSink:
    """Hands metrics to anything with ``log(dict, step)``, one call for each step.

    Args:
        run: A W&B run, or the ``wandb`` module with a run open. Its steps must not go back.

    Example:
        >>> class Run:
        ...     def log(self, metrics, step):
        ...         print(metrics, step)
        >>> WandbSink(Run()).log({"lm loss": 2.5}, 1)
        {'lm loss': 2.5} 1
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics in one call; the client drops an empty name, so it gets another."""
        named = {name or "unnamed": value for name, value in plain_numbers(metrics).items()}
        self._run.log(named, step)

    def flush(self) -> None:
        """Do nothing: the client sends in the background."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _open(settings: Any, config: Any, earlier_run_id: str | None) -> Any:
    import wandb

    with without_secrets("Weights & Biases"):
        return wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_exp_name,
            dir=settings.wandb_save_dir,
            entity=settings.wandb_entity,
            config=config_params(config),
        )


TRACKER = Tracker(
    attribute="wandb_logger",
    label="Weights & Biases",
    extra="wandb",
    asked_by="wandb_project",
    named_by="wandb_exp_name",
    open=_open,
    adapt=WandbSink,
)
