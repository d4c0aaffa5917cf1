"""Run log and comparison of ranks for Lightning's ``Trainer``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from mcore.observe.adapters.trainer_log import TrainerLog
from mcore.observe.extras import require_extra
from mcore.observe.runs.state import RunLog
from mcore.observe.sinks.delivery.process_end import status_of

require_extra("lightning", "mcore.observe.adapters.lightning")

from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.loggers import Logger  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

__all__ = ["ObserveCallback", "ObserveLogger"]


class ObserveCallback(Callback):
    """Logs the steps of a ``Trainer``, with a console line, and compares its ranks.

    Every rank of the job has one. Rank 0 writes, as with Lightning's loggers. A step is a step of
    the optimizer: its loss is the sum over its batches, its samples and tokens are this rank's
    times the data-parallel ranks. :attr:`logger` joins the loggers of the trainer, so values
    of modules, validation and test are sent to the sinks. A ``fit`` that continues the last step,
    or a checkpoint with the counters, continues the run. Otherwise it starts a run in a new folder
    (``-2``). The run ends with an exception or with the process.

    The time from a batch to the backward pass, and each wait for data, is compared over the ranks
    about every five minutes. Collectives in the forward pass, as with FSDP, hide slow ranks.

    Args:
        run_dir: Folder of the run.
        straggler: Whether to compare ranks, or settings of
            :meth:`mcore.observe.StragglerDetector.configure`.
        settings: As for :class:`mcore.observe.RunLog`.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting does not exist.

    Example:
        >>> import tempfile
        >>> callback = ObserveCallback(tempfile.mkdtemp(), log_every=50, tensorboard=True)
        >>> trainer = Trainer(callbacks=[callback], logger=callback.logger)  # doctest: +SKIP
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        straggler: bool | Mapping[str, Any] = True,
        **settings: Any,
    ) -> None:
        self._runs = TrainerLog(run_dir, straggler, settings, writing_rank=0)
        self._logger = ObserveLogger._share(self._runs)
        self._loaded: Mapping[str, Any] = {}
        self._step = 0
        self._lr: float | None = None
        self._loss: Any = None
        self._is_forward = False
        self._has_saved = False

    @property
    def run_log(self) -> RunLog:
        """The log of the present run."""
        return self._runs.log

    @property
    def logger(self) -> ObserveLogger:
        """A logger that writes to the same run."""
        return self._logger

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of the run, for a checkpoint."""
        return {name: value.item() for name, value in self.run_log.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the counters of a checkpoint.

        Args:
            state_dict: The result of :meth:`state_dict`.
        """
        self._loaded = state_dict

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Add the logger to those of the trainer. The trainer has chosen its folders by now."""
        if self._logger not in trainer.loggers:
            trainer.loggers = [*trainer.loggers, self._logger]

    on_validation_start = on_test_start = on_fit_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the run, or continue it."""
        self._step, self._loss = trainer.global_step, None
        last = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        self._runs.begin(
            self._step,
            self._loaded,
            {**self._logger.params, **dict(pl_module.hparams)},
            train_iters=int(last) if last != float("inf") else None,
        )
        self._loaded = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to wait for data."""
        self._runs.begin_wait()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the wait for data, count the batch, and time its forward pass."""
        self._runs.end_wait(is_data=not self._has_saved)
        self._has_saved = False
        self._runs.count(batch)
        if self._runs.detector is not None:
            self._runs.detector.start()
            self._is_forward = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """End the time of a forward pass."""
        if self._is_forward and self._runs.detector is not None:
            self._runs.detector.stop()
        self._is_forward = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Keep the learning rate before a scheduler changes it."""
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a step of the optimizer, and compare the ranks if it is time."""
        self.on_before_backward(trainer, pl_module, None)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        steps = trainer.global_step - self._step
        if steps > 0:
            ranks = _count_dp_ranks(trainer)
            self._runs.end_step(ranks, steps=steps)
            losses = {} if self._loss is None else {"loss": self._loss}
            self._runs.log_line(losses, ranks, lr=self._lr)
            self._step, self._loss = trainer.global_step, None
            self._runs.report_ranks()
        self._runs.begin_wait()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the validation out of the step time."""
        self._runs.begin_wait()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Leave a save out of the wait for data."""
        self._has_saved = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the training. A test may follow."""
        self._runs.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run as failed or killed."""
        self._runs.close(_find_status(exception))

    def close(self, status: str = "FINISHED") -> None:
        """End the run before the process ends. A second call does nothing.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.
        """
        self._runs.close(status)


class ObserveLogger(Logger):
    """Writes the metrics of modules to the files and trackers of a run, on rank 0.

    Steps count from 1, so they are Lightning's number plus one. Checkpoints are saved in the run's
    folder. :class:`ObserveCallback` adds console lines, counters and the comparison of ranks. Its
    ``logger`` writes to the same run.

    Args:
        run_dir: Folder of the run.
        settings: As for :class:`mcore.observe.RunLog`.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting does not exist.

    Example:
        >>> import tempfile
        >>> logger = ObserveLogger(tempfile.mkdtemp(), tensorboard=True)
        >>> trainer = Trainer(logger=logger)  # doctest: +SKIP
    """

    def __init__(self, run_dir: str | os.PathLike[str], **settings: Any) -> None:
        super().__init__()
        self._runs = TrainerLog(run_dir, straggler=False, settings=settings, writing_rank=0)
        self._owns_steps = True
        self.params: Mapping[str, Any] = {}

    @classmethod
    def _share(cls, runs: TrainerLog) -> ObserveLogger:
        """Make a logger that writes to the runs of a callback and does not count steps."""
        made = cls.__new__(cls)
        Logger.__init__(made)
        made._runs, made._owns_steps, made.params = runs, False, {}
        return made

    @property
    def experiment(self) -> RunLog:
        """The log of the present run."""
        return self._runs.log

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self._runs.folder.name

    @property
    def version(self) -> str:
        """Empty, since a folder has one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The parent of the run's folder."""
        return str(self._runs.folder.parent)

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return str(self._runs.folder)

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Keep settings for the trackers, which get them at the start of the run.

        Args:
            params: Settings. Keys, passwords and tokens are masked.
        """
        self.params = vars(params) if isinstance(params, Namespace) else dict(params)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send metrics to the sinks, on rank 0 only.

        Args:
            metrics: Numbers by name.
            step: Lightning's number of the step. None means the current step, and so does any
                number after the end of the training.
        """
        progress = self._runs.log.train_state
        at = None if step is None else int(step) + 1
        if self._owns_steps and at is not None:
            progress.step = max(progress.step, at)
        elif not self._runs.is_training:
            at = None
        self._runs.log.log_metrics(dict(metrics), step=at)

    def finalize(self, status: str) -> None:
        """End the run if the trainer failed. Otherwise the run ends with the process.

        Args:
            status: The status of the trainer.
        """
        if status == "failed":
            self._runs.close(_find_status(sys.exc_info()[1]) if sys.exc_info()[1] else "FAILED")


def _find_status(error: BaseException | None) -> str:
    return "KILLED" if isinstance(error, SIGTERMException) else status_of(error)


def _count_dp_ranks(trainer: Any) -> int:
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas", trainer.world_size))
