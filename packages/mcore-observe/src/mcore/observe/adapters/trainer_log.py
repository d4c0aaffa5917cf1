"""Shared by the adapters: the logs of a trainer's runs, its waits for data, and its counts."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.rank_logging import writes_log
from mcore.observe.runs.config import ConfigContainer
from mcore.observe.runs.slow_ranks import log_slow_ranks
from mcore.observe.runs.state import RunLog
from mcore.observe.sinks.delivery.process_end import on_process_end
from mcore.observe.sinks.trackers import import_libraries
from mcore.observe.straggler.detector import StragglerDetector
from mcore.observe.straggler.report import StragglerReport
from mcore.observe.training_log.log import log_state_of
from mcore.parallel.groups import world_size
from mcore.parallel.torch_compat import is_distributed

_RESERVED_NAMES = frozenset(inspect.signature(RunLog.log_step).parameters)


@dataclass
class _TrainerConfig(ConfigContainer):
    """The settings of a run and of its trainer. Trackers show both."""

    trainer: Mapping[str, Any] = field(default_factory=dict)


class _NoWaitError(Exception):
    """Raised into an open range to drop it, because it was no wait for data."""


class TrainerLog:
    """The logs of a trainer's consecutive runs, and the counts between two lines.

    The folder of a second run from step 0 ends in ``-2``, and so on. The end of the process closes
    the last run, as failed if it is still training.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        straggler: bool | Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        writing_rank: int | None = None,
    ) -> None:
        self.folder = Path(run_dir)
        self.log = RunLog(run_dir, **settings)
        self.log.writing_rank = writing_rank
        self.detector: StragglerDetector | None = None
        self._settings = settings
        self._straggler = straggler
        self._noted: StragglerReport | None = None
        self._num_runs = 1
        self._is_training = self._is_closed = False
        self._is_watching = False
        self._steps = self._samples = 0  # since the last line
        self._batch_samples = 0  # since the last step
        self._tokens: int | None = None
        self._waiting_since_s: float | None = None
        self._hooks: list[Any] = []

    @property
    def is_training(self) -> bool:
        """Whether training has started and not ended."""
        return self._is_training

    @property
    def has_unlogged_steps(self) -> bool:
        """Whether steps have ended since the last line."""
        return self._steps > 0

    def begin(
        self,
        step: int,
        counters: Mapping[str, Any],
        trainer: Mapping[str, Any],
        *,
        train_iters: int | None = None,
        is_timed: bool = True,
    ) -> None:
        """Start or continue training after a step, with the counters of its checkpoint."""
        before = self.log.train_state
        if self._is_training:
            self.finish()
            self._is_training = True
        if before.step != step and (before.step or self._is_closed):
            self.log.extra_sinks = ()  # the next run uses them
            self.close("FAILED" if self._is_training else "FINISHED")
        if self._is_closed:
            self._num_runs += not step
            name = self.folder.name + (f"-{self._num_runs}" if self._num_runs > 1 else "")
            writing_rank = self.log.writing_rank
            self.log = RunLog(self.folder.with_name(name), **self._settings)
            self.log.writing_rank = writing_rank
            self._is_closed = False
        if step != self.log.train_state.step:
            same = before.state_dict() if before.step == step else {}
            self.log.load_state_dict({**same, **counters, "step": step})
        self._steps = self._samples = self._batch_samples = 0
        self._tokens = None
        if not self._is_watching:
            on_process_end(self._end_with_process, first=True)
        self._is_training = self._is_watching = True
        config = self.log.cfg
        self.log.cfg = _TrainerConfig(
            logger=config.logger, train=config.train, dataset=config.dataset, trainer=dict(trainer)
        )
        config.train.train_iters = train_iters
        if writes_log(self.log):
            import_libraries(config.logger)
        if self._straggler and self.detector is None:
            self.detector = StragglerDetector()
            given = self._straggler if isinstance(self._straggler, Mapping) else {}
            self.detector.configure(
                world_size(),
                dist.get_rank() if is_distributed() else 0,
                **{"enabled": True, "controller": False, **given},
            )
        if is_timed:
            log_state_of(self.log).meter.start()

    def _end_with_process(self, status: str) -> None:
        if not self._is_closed:
            is_interrupted = self._is_training and status == "FINISHED"
            self.close("FAILED" if is_interrupted else status)

    def watch_forward(self, model: torch.nn.Module) -> None:
        """Time the forward passes of a model in training mode, and count their batches."""
        self._hooks = [
            model.register_forward_pre_hook(self._start_forward, with_kwargs=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def count(self, batch: Any) -> None:
        """Count the samples and tokens of a batch of this rank."""
        samples, tokens = count_batch(batch)
        self._batch_samples += samples
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens

    def end_step(
        self, ranks: int, *, steps: int = 1, samples: int = 0, most_samples: int | None = None
    ) -> None:
        """Count steps with their samples over ``ranks``; 0 samples means the counted batches.

        ``most_samples`` replaces a larger number, which a model called several times for a batch
        gives, and 0.
        """
        samples = samples or self._batch_samples * ranks
        self._batch_samples = 0
        if most_samples is not None and not 0 < samples <= most_samples:
            samples = most_samples
        samples = samples or self._settings.get("batch_size", 1) * ranks * steps
        progress = self.log.train_state
        progress.step += steps
        progress.consumed_train_samples += samples
        self._steps += steps
        self._samples += samples

    def report_ranks(self) -> None:
        """Compare the ranks if it is time. All ranks call it after every step."""
        if self.detector is None:
            return
        try:
            self.detector.report_if_due()
        finally:  # a slow rank may stop the job with an exception
            found = self.detector.last_report if writes_log(self.log) else None
            if found is not self._noted and found is not None:
                run_dir = Path(str(self.log.cfg.logger.run_dir))
                log_slow_ranks(run_dir, self.log.train_state.step, found.stragglers)
                self._noted = found

    def log_line(
        self,
        losses: Mapping[str, Any],
        ranks: int,
        *,
        lr: Any = None,
        grad_norm: Any = None,
        tokens: int | None = None,
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        """Log the steps since the last call, with their average losses. All ranks call it."""
        progress, config = self.log.train_state, self.log.cfg
        if tokens is None and self._tokens is not None:
            tokens = self._tokens * ranks
        steps, samples = self._steps, self._samples
        self._steps = self._samples = 0
        self._tokens = None
        progress.step -= steps  # log_step counts them
        progress.consumed_train_samples -= samples
        config.train.micro_batch_size = samples // steps
        config.train.num_microbatches = config.data_parallel_size = 1
        named = {
            f"trainer/{name}" if name in _RESERVED_NAMES else name: value
            for name, value in (scalars or {}).items()
        }
        self.log.log_step(
            losses, lr=lr, grad_norm=grad_norm, samples=samples, tokens=tokens, steps=steps, **named
        )

    def finish(self) -> None:
        """End the training but not the run, which also gets later metrics."""
        self.end_wait(is_data=False)
        self._is_training = False
        while self._hooks:
            self._hooks.pop().remove()

    def close(self, status: str) -> None:
        """End the run."""
        self.finish()
        self._is_closed = True
        self.log.close(status)

    def begin_wait(self) -> None:
        """Start a wait for data. :meth:`end_wait` drops it if it was for something else."""
        self.end_wait(is_data=False)
        if not self._is_training:
            return
        self._waiting_since_s = time.perf_counter()
        if self.detector is not None:
            self.detector(bdata=True).start()

    def end_wait(self, *, is_data: bool = True, is_step: bool = False) -> None:
        """End a wait. Unless it was for data or part of a step, leave it out of the step time."""
        if self._waiting_since_s is None:
            return
        seconds = time.perf_counter() - self._waiting_since_s
        self._waiting_since_s = None
        meter = log_state_of(self.log).meter
        if is_data:
            meter.add_wait(seconds)
        elif not is_step:
            meter.leave_out(seconds)
        if self.detector is not None and is_data:
            self.detector.stop()
        elif self.detector is not None:
            self.detector.__exit__(_NoWaitError, _NoWaitError(), None)

    def _start_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if model.training:
            self.count(kwargs or args)
            if self.detector is not None:
                self.detector.start()

    def _end_forward(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if model.training and self.detector is not None:
            self.detector.stop()


def count_batch(batch: Any) -> tuple[int, int | None]:
    """Return the samples of a batch, 0 without a tensor, and the number of its ``input_ids``."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim():
            return len(ids), ids.numel()
        return count_batch(list(batch.values()))
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0, None
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for part in batch:
            samples, tokens = count_batch(part)
            if samples:
                return samples, tokens
    return 0, None
