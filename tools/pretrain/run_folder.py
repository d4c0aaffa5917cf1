"""The folder of a run: its name, its creation, and the paths inside it."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.usage import UsageError


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    def is_gone(self) -> bool:
        """Whether the folder has lost its ``config.json``. Costs one stat."""
        try:
            (self.path / "config.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a passing error of the disk is no loss
            return False
        return False

    @property
    def metrics(self) -> Path:
        """JSON objects, one or more per step, each with its step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def mlflow_database(self) -> Path:
        """The MLflow store of a run without a server."""
        return self.path / "mlflow.db"

    @property
    def mlflow_artifacts(self) -> Path:
        """The folder of that store's files, created with the first file."""
        return self.path / "mlflow_artifacts"

    @property
    def mlflow_facts(self) -> Path:
        """The id of the MLflow run, for later starts that continue it."""
        return self.path / "mlflow.json"

    @property
    def straggler_log(self) -> Path:
        """The reports of the straggler detector."""
        return self.path / "straggler.log"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def diverged(self) -> Path:
        """The reason of a divergence. Exists until the user resumes the run."""
        return self.path / "diverged.txt"

    @property
    def loss_picture(self) -> Path:
        """Train and validation loss over steps."""
        return self.path / "loss.png"

    @property
    def page(self) -> Path:
        """A web page with everything that was logged."""
        return self.path / "run.html"

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return f"hatch run pretrain --resume {shlex.quote(str(self.path))}"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.checkpoints / f"step_{step:08d}"


def name_run(runs_dir: Path, layout: str, started: int, number: int = 1) -> Path:
    """``<timestamp>-<layout>`` in the folder of runs, with ``-2`` if that name exists."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    return runs_dir / (f"{stamp}-{layout}" + (f"-{number}" if number > 1 else ""))


def free_number(runs_dir: Path, layout: str, started: int) -> int:
    """The first number for which :func:`name_run` returns a new name."""
    number = 1
    while name_run(runs_dir, layout, started, number).exists():
        number += 1
    return number


def make_run_folder(path: Path) -> RunFolder:
    """Create the folder of a new run. Raises UsageError if it is not empty or cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"--run-dir {path} is not empty: pass a new folder, or --resume it")
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write the run folder {path}: {error.strerror}") from None
    return RunFolder(path)
