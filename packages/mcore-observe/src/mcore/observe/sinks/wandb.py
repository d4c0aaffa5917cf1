"""Weights & Biases runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.secret_texts import without_secrets
from mcore.observe.sinks.plain_numbers import plain_numbers

__all__ = ["WandbSink", "open_wandb"]


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
        """Log the metrics in one call; the client drops an empty name, so it becomes another."""
        named = {name or "unnamed": value for name, value in plain_numbers(metrics).items()}
        self._run.log(named, step)

    def flush(self) -> None:
        """Do nothing: the client sends in the background."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_wandb(
    project: str,
    name: str,
    *,
    save_dir: str | None = None,
    entity: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Open a run of Weights & Biases.

    Args:
        project: The project.
        name: Name of the run.
        save_dir: Where its files go; None leaves that to the client.
        entity: Who owns the project; None leaves that to the client.
        config: Settings to show with the run, without secrets.

    Returns:
        The run.

    Raises:
        ModuleNotFoundError: ``wandb`` is not installed; names the extra.
        Exception: What W&B raised, without secrets: as RuntimeError where its text has any.
    """
    require_extra("wandb", "wandb_project")
    import wandb

    with without_secrets("Weights & Biases"):
        return wandb.init(
            project=project, name=name, dir=save_dir, entity=entity, config=dict(config or {})
        )
