"""What the adapters share: the logs of a trainer's runs, the waits of its steps, and counts."""

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

from mcore.observe.rank_logging import is_last_rank
from mcore.observe.runs.config import ConfigContainer
from mcore.observe.runs.run_log import RunLog
from mcore.observe.runs.slow_ranks import log_slow_ranks
from mcore.observe.sinks.delivery.process_end import on_process_end
from mcore.observe.sinks.trackers import import_libraries
from mcore.observe.straggler.detector import StragglerDetector
from mcore.observe.straggler.report import StragglerReport
from mcore.observe.training_log.log import log_state_of
from mcore.parallel.groups import world_size
from mcore.parallel.torch_compat import is_distributed

_OWN_NAMES = frozenset(inspect.signature(RunLog.log_step).parameters)


@dataclass
class _TrainerConfig(ConfigContainer):
    """The settings of a run, with those of its trainer, which trackers show as well."""

    trainer: Mapping[str, Any] = field(default_factory=dict)


class _NoWaitError(Exception):
    """Leaves a range that turned out to be no wait for data, which drops it."""


class TrainerLog:
    """The logs of the runs of a trainer, one after the other, and what is counted for them.

    A run that starts from step 0 after another one has ``-2`` and so on at its folder's name. The
    last one is closed when the process ends, as failed if it is still training then.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        straggler: bool | Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self.folder = Path(run_dir)
        self.log = RunLog(run_dir, **settings)
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
        """Whether training has begun and not ended."""
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
        """Begin to train, or go on, after a step; the counters are those of its checkpoint."""
        before = self.log.train_state
        if self._is_training:
            self.finish()
            self._is_training = True
        if before.step != step and (before.step or self._is_closed):
            self.log.extra_sinks = ()  # the next run goes on with them
            self.close("FAILED" if self._is_training else "FINISHED")
        if self._is_closed:
            self._num_runs += not step
            name = self.folder.name + (f"-{self._num_runs}" if self._num_runs > 1 else "")
            self.log = RunLog(self.folder.with_name(name), **self._settings)
            self._is_closed = False
        if step != self.log.train_state.step:
            same = before.state_dict() if before.step == step else {}
            self.log.load_state_dict({**same, **counters, "step": step})
        self._steps = self._samples = self._batch_samples = 0
        self._tokens = None
        if not self._is_watching:
            on_process_end(self._end_with_process, first=True)
        self._is_training = self._is_watching = True
        self._show(trainer, train_iters)
        if is_last_rank():
            import_libraries(self.log.cfg.logger)
        self._compare_ranks()
        if is_timed:
            log_state_of(self.log).meter.start()

    def _show(self, trainer: Mapping[str, Any], train_iters: int | None) -> None:
        config = self.log.cfg
        self.log.cfg = _TrainerConfig(
            logger=config.logger, train=config.train, dataset=config.dataset, trainer=dict(trainer)
        )
        config.train.train_iters = train_iters

    def _compare_ranks(self) -> None:
        if not self._straggler or self.detector is not None:
            return
        self.detector = StragglerDetector()
        given = self._straggler if isinstance(self._straggler, Mapping) else {}
        self.detector.configure(
            world_size(),
            dist.get_rank() if is_distributed() else 0,
            **{"enabled": True, "controller": False, **given},
        )

    def _end_with_process(self, status: str) -> None:
        if not self._is_closed:
            is_cut_off = self._is_training and status == "FINISHED"
            self.close("FAILED" if is_cut_off else status)

    def watch_forward(self, model: torch.nn.Module) -> None:
        """Time the forward passes of a model that trains, and count their batches."""
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def count(self, batch: Any) -> None:
        """Count the samples and tokens of a batch of this rank."""
        samples, tokens = count_batch(batch)
        self._batch_samples += samples
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens

    def end_step(
        self,
        ranks: int,
        *,
        steps: int = 1,
        samples: int = 0,
        most_samples: int | None = None,
    ) -> None:
        """Count steps with their samples, 0 for those that as many ranks as this one have counted.

        More than there can be, from a model that is called several times for a batch, is cut.
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
        """Compare the ranks where that is due; all ranks call it after every step."""
        if self.detector is None:
            return
        try:
            self.detector.report_if_due()
        finally:  # also where a slow rank stops the job
            found = self.detector.last_report if is_last_rank() else None
            if found is not self._noted and found is not None:
                log_slow_ranks(self._run_dir(), self.log.train_state.step, found.stragglers)
                self._noted = found

    def _run_dir(self) -> Path:
        """The folder of the present run."""
        return Path(str(self.log.cfg.logger.run_dir))

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
        """Log the steps since the last call, whose average the losses are; all ranks call it."""
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
            f"trainer/{name}" if name in _OWN_NAMES else name: value
            for name, value in (scalars or {}).items()
        }
        self.log.log_step(
            losses,
            lr=lr,
            grad_norm=grad_norm,
            samples=samples,
            tokens=tokens,
            steps=steps,
            **named,
        )

    def finish(self) -> None:
        """End the training, not the run: what is logged afterwards belongs to it."""
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
        """From here on training waits for data, unless it turns out not to."""
        self.end_wait(is_data=False)
        if not self._is_training:
            return
        self._waiting_since_s = time.perf_counter()
        if self.detector is not None:
            self.detector(bdata=True).start()

    def end_wait(self, *, is_data: bool = True, is_step: bool = False) -> None:
        """End a wait; one that was not for data is left out of the time, but for a step's own."""
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

    def _begin_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if model.training:
            self.count(kwargs or args)
            if self.detector is not None:
                self.detector.start()

    def _end_forward(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if model.training and self.detector is not None:
            self.detector.stop()


def count_batch(batch: Any) -> tuple[int, int | None]:
    """Return the samples of a batch, 0 if it has no tensor, and its ``input_ids`` if it has any."""
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
