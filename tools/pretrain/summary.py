"""The last lines a run prints: where it is, what it reached, and what to type next."""

from __future__ import annotations

import time
from pathlib import Path

from pretrain.checkpoints import resume_command
from pretrain.loss_picture import TRAIN_LOSS, read_curve
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings


class Summary:
    """Counts the steps of this start and words the result."""

    def __init__(self, folder: RunFolder, settings: Settings, *, first_step: int) -> None:
        self.folder = folder
        self.settings = settings
        self.first_step = first_step
        self.steps = 0
        self.train_s = 0.0
        self.validation: float | None = None
        self._step_began = 0.0

    def start_step(self) -> None:
        """Call before each optimizer step."""
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        """Call after each optimizer step; logs, validation and checkpoints do not count."""
        self.train_s += time.perf_counter() - self._step_began
        self.steps += 1

    def lines(self) -> list[str]:
        """The closing lines."""
        curve = read_curve(self.folder.metrics, TRAIN_LOSS)
        tokens = self.steps * self.settings.global_batch_size * self.settings.seq_length
        path = self.folder.path
        more = ""
        if self.first_step + self.steps >= self.settings.train_iters:
            more = f" --train-iters {2 * self.settings.train_iters}"
        return [
            f"run folder       {path}",
            f"loss             {curve[0][1]:.3f} at step {curve[0][0]}, "
            f"{curve[-1][1]:.3f} at step {curve[-1][0]} (nats per byte)",
            f"validation loss  {self.validation:.3f} nats per byte",
            f"speed            {tokens / max(self.train_s, 1e-9):,.0f} tokens per second",
            f"loss curve       {self.folder.loss_picture}",
            f"TensorBoard      hatch run tensorboard --logdir {_quoted(self.folder.tensorboard)}",
            f"go on            {resume_command(path)}{more}",
        ]


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
