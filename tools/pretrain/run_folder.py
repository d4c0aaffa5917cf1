"""The folder of a run: its name, its creation, the paths inside it, and files opened safely."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tempfile
import time
from itertools import count
from pathlib import Path

from pretrain.usage import UsageError

LOCK_NAME = "job.lock"


class RunFolder:
    """Paths of a run.

    Attributes:
        path: the folder itself.
        metrics: JSON objects, one or more per step, each with its step.
        tensorboard: the folder of event files.
        mlflow_database: the MLflow store of a run without a server.
        mlflow_artifacts: the folder of that store's files, created with the first file.
        mlflow_facts: the id of the MLflow run, for later starts that continue it.
        straggler_log: the reports of the straggler detector.
        checkpoints: one folder per checkpoint.
        diverged: the reason of a divergence. Exists until the user resumes the run.
        loss_picture: train and validation loss over steps.
        page: a web page with everything that was logged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.mlflow_database = path / "mlflow.db"
        self.mlflow_artifacts = path / "mlflow_artifacts"
        self.mlflow_facts = path / "mlflow.json"
        self.straggler_log = path / "straggler.log"
        self.checkpoints = path / "checkpoints"
        self.diverged = path / "diverged.txt"
        self.loss_picture = path / "loss.png"
        self.page = path / "run.html"

    def is_gone(self) -> bool:
        """Whether the folder has lost its ``config.json``. Costs one stat."""
        try:
            (self.path / "config.json").stat()
        except OSError as error:  # a passing error of the disk is no loss
            return isinstance(error, (FileNotFoundError, NotADirectoryError))
        return False

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
    names = ((number, name_run(runs_dir, layout, started, number)) for number in count(1))
    return next(number for number, path in names if not path.exists())


def make_run_folder(path: Path, *, trusted: bool = False) -> RunFolder:
    """Create the folder of a new run. Raises UsageError if it is not empty or cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not trusted:
            refuse_foreign(path, "--run-dir")
        if any(path.iterdir()):
            raise UsageError(f"--run-dir {path} is not empty: pass a new folder, or --resume it")
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"cannot write the run folder {path}: {error.strerror}") from None
    return RunFolder(path)


def refuse_foreign(path: Path, option: str) -> None:
    """Raise UsageError if another user owns a run folder or a file in it, or a file is a link.

    The job writes into the files of the folder and of the folders in it, and a link leads it to a
    file elsewhere. The folder itself may be a link of this user.
    """
    try:
        inside = list(path.glob("*")) + list(path.glob("*/*"))
        for one in [path, *inside]:
            with contextlib.suppress(FileNotFoundError):  # removed by another rank
                facts, problem = one.lstat(), ""
                if one != path and not is_plain(facts):
                    problem = "is a link, or neither a file nor a folder"
                if not (is_own(facts, one) and (one != path or is_own(path.stat(), path))):
                    problem = f"belongs to another user ({facts.st_uid})"
                if problem:
                    trust = "If you trust the folder, add --trust-run"
                    raise UsageError(f"{option} {path}: {one} {problem}. {trust}")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def is_own(facts: os.stat_result, path: Path) -> bool:
    """Whether a file is this user's: its owner is the owner of a new file at its place.

    A network file system may store the files of root as those of another user.
    """
    if facts.st_uid == os.geteuid():
        return True
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
        return facts.st_uid == os.fstat(probe.fileno()).st_uid
    return False


def is_plain(facts: os.stat_result) -> bool:
    """Whether these are the facts of a folder, or of a file without a second name."""
    return stat.S_ISDIR(facts.st_mode) or (stat.S_ISREG(facts.st_mode) and facts.st_nlink < 2)
