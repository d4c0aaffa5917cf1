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
        """Whether a folder that had its settings has them no longer; one look at the disk."""
        try:
            (self.path / "config.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a disk that does not answer now
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
        """The MLflow store of runs that log to no server."""
        return self.path / "mlflow.db"

    @property
    def mlflow_artifacts(self) -> Path:
        """Where that store's files would go; created with the first one."""
        return self.path / "mlflow_artifacts"

    @property
    def mlflow_facts(self) -> Path:
        """Which MLflow run this is, so that a later start continues it."""
        return self.path / "mlflow.json"

    @property
    def straggler_log(self) -> Path:
        """What the straggler detector found, one report after the other."""
        return self.path / "straggler.log"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def diverged(self) -> Path:
        """Why a run has ended that goes on by hand only; gone as soon as it does."""
        return self.path / "diverged.txt"

    @property
    def loss_picture(self) -> Path:
        """Train and validation loss over steps."""
        return self.path / "loss.png"

    @property
    def page(self) -> Path:
        """Everything that was logged as one page for a browser."""
        return self.path / "run.html"

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return f"hatch run pretrain --resume {shlex.quote(str(self.path))}"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.checkpoints / f"step_{step:08d}"


def name_run(runs_dir: Path, layout: str, started: int, number: int = 1) -> Path:
    """``<timestamp>-<layout>`` below the folder of runs; ``-2`` if that is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    return runs_dir / (f"{stamp}-{layout}" + (f"-{number}" if number > 1 else ""))


def free_number(runs_dir: Path, layout: str, started: int) -> int:
    """The first number whose name is not taken."""
    number = 1
    while name_run(runs_dir, layout, started, number).exists():
        number += 1
    return number


def make_run_folder(path: Path) -> RunFolder:
    """Make the folder of a new run; UsageError if it has content or cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"--run-dir {path} is not empty: name a new folder, or --resume it")
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write the run folder {path}: {error.strerror}") from None
    return RunFolder(path)
