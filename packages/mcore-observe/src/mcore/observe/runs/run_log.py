"""The log of a run in one object, for a plain training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore.observe.runs.config import (
    ConfigContainer,
    DatasetConfig,
    LoggerConfig,
    TrainingConfig,
)
from mcore.observe.runs.state import GlobalState
from mcore.observe.sinks.base import MetricSink
from mcore.observe.training_log.measures import DATA_TIMER


class RunLog(GlobalState):
    """The log of a run: console, ``metrics.jsonl`` in the run's folder, and trackers.

    The settings are written to ``config.json``, without secrets.

    Every rank makes one and calls :meth:`log_step`. The last rank writes. Use a ``with`` block to
    report to trackers how the run ended. To resume, save :meth:`state_dict` with a checkpoint and
    load it before the first step: counters and trackers continue, and metrics logged after the
    checkpoint are dropped or overwritten. A run that loads nothing is new. If its folder has the
    ``metrics.jsonl`` of an earlier run, that file is renamed, with a WARNING.

    Args:
        run_dir: Folder of the run. ``python -m mcore.observe show`` reads it.
        batch_size: Samples of one step on one rank.
        train_iters: Steps of the whole run, or None.
        seq_length: Tokens of a sample, for tokens per second. None if samples have no fixed length.
        log_every: Steps between lines, and between values of trackers and files. Only these steps
            wait for the device.
        tensorboard: Write event files into the folder ``tensorboard`` of the run.
        mlflow: Address of an MLflow server, or a database such as ``sqlite:///mlflow.db``.
        wandb: A Weights & Biases project.
        sinks: Additional sinks.
        settings: Further settings of :class:`mcore.observe.LoggerConfig`.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting does not exist.

    Example:
        >>> import tempfile, torch
        >>> with RunLog(tempfile.mkdtemp(), batch_size=8) as log:
        ...     for step in range(1, 4):
        ...         log.log_step({"loss": torch.tensor(1.0 / step)}, lr=1e-3)
        >>> log.train_state.consumed_train_samples
        24
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        batch_size: int = 1,
        train_iters: int | None = None,
        seq_length: int | None = None,
        log_every: int = 10,
        tensorboard: bool = False,
        mlflow: str | None = None,
        wandb: str | None = None,
        sinks: Sequence[MetricSink] = (),
        **settings: Any,
    ) -> None:
        for argument, count in (("batch_size", batch_size), ("seq_length", seq_length)):
            if count is not None and count < 1:
                raise ValueError(f"RunLog got {argument}={count}: give a number of at least 1")
        folder = Path(run_dir)
        name = folder.absolute().name
        chosen: dict[str, Any] = {
            "run_dir": str(folder),
            "log_interval": log_every,
            "tensorboard_log_interval": log_every,
        }
        if tensorboard:
            chosen["tensorboard_dir"] = str(folder / "tensorboard")
        if mlflow is not None:
            experiment = folder.absolute().parent.name or "runs"
            chosen |= {"mlflow_experiment": experiment, "mlflow_run_name": name}
            chosen["mlflow_tracking_uri"] = mlflow
        if wandb is not None:
            chosen |= {"wandb_project": wandb, "wandb_exp_name": name}
            chosen["wandb_save_dir"] = str(folder)
        logger = LoggerConfig(**chosen | settings)
        logger.finalize()
        config = ConfigContainer(
            logger=logger,
            train=TrainingConfig(micro_batch_size=batch_size, train_iters=train_iters),
            dataset=DatasetConfig(seq_length=seq_length),
        )
        super().__init__(config, extra_sinks=sinks)
        self._writes_config = True

    @contextmanager
    def data(self) -> Iterator[None]:
        """Measure the wait for data. The console line shows it in percent of the time.

        Example:
            >>> import tempfile
            >>> log = RunLog(tempfile.mkdtemp())
            >>> with log.data():
            ...     batch = [1, 2, 3]
        """
        timer = self.timers(DATA_TIMER, log_level=0)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint.

        Returns:
            Tensors of :class:`mcore.observe.TrainState`.

        Example:
            >>> import tempfile
            >>> RunLog(tempfile.mkdtemp()).state_dict()["step"]
            tensor(0)
        """
        return self.train_state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a run from the counters of a checkpoint, before the first step is logged.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Example:
            >>> import tempfile
            >>> log = RunLog(tempfile.mkdtemp())
            >>> log.load_state_dict({"step": 7})
            >>> log.cfg.logger.resume_step
            7
        """
        self.train_state.load_state_dict(state_dict)
        self.cfg.logger.resume_step = self.train_state.step
