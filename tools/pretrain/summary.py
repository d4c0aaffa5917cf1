"""The last lines a run prints: where it is, what it reached, and what to type next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from pretrain.checkpoints import resume_command
from pretrain.loss_picture import read_curve
from pretrain.mlflow_run import JobRun
from pretrain.objective import objective_of
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.straggler_watch import StragglerWatch


class Summary:
    """Counts the steps of this start and words the result."""

    def __init__(self, folder: RunFolder, settings: Settings, *, first_step: int) -> None:
        self.folder = folder
        self.settings = settings
        self.first_step = first_step
        self.steps = 0
        self.train_s = 0.0
        self.validation: float | None = None
        self.graphs: str | None = None
        self._step_began = 0.0

    def start_step(self) -> None:
        """Call before each optimizer step."""
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        """Call after each optimizer step; logs, validation and checkpoints do not count."""
        self.train_s += time.perf_counter() - self._step_began
        self.steps += 1

    def lines(self, mlflow: JobRun | None, watch: StragglerWatch) -> list[str]:
        """The closing lines."""
        objective = objective_of(self.settings)
        digits, unit = objective.digits, objective.unit
        curve = read_curve(self.folder.metrics, objective.loss_name)
        tokens = self.steps * self.settings.global_batch_size * self.settings.seq_length
        path = self.folder.path
        more = ""
        if self.first_step + self.steps >= self.settings.train_iters:
            more = f" --train-iters {2 * self.settings.train_iters}"
        return [
            f"run folder       {path}",
            *self._special(),
            f"loss             {curve[0][1]:.{digits}f} at step {curve[0][0]}, "
            f"{curve[-1][1]:.{digits}f} at step {curve[-1][0]} ({unit})",
            f"validation loss  {self.validation:.{digits}f} {unit}",
            f"speed            {tokens / max(self.train_s, 1e-9):,.0f} tokens per second",
            *(f"slow ranks       {text}" for text in (watch.summary(),) if text),
            f"loss curve       {self.folder.loss_picture}",
            *self._pages(mlflow),
            f"go on            {resume_command(path)}{more}",
        ]

    def _special(self) -> Iterator[str]:
        if self.settings.value_head:
            yield f"objective        {objective_of(self.settings).description}"
        if self.graphs is not None:
            yield f"graphs           {self.graphs}"

    def _pages(self, mlflow: JobRun | None) -> Iterator[str]:
        if self.settings.tensorboard:
            folder = _quoted(self.folder.tensorboard)
            yield f"TensorBoard      hatch run tensorboard --logdir {folder}"
        if mlflow is not None:
            yield f"MLflow           {mlflow.summary()}"


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
