"""The training loop: steps, logs, validation, checkpoints and the end of a run."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe import GlobalState, JsonlSink, TrainState, status_of, training_log
from mcore.parallel.checkpoint import CheckpointingException
from pretrain.model.stages import chunks_of
from pretrain.run.saving import Saver, attempt, check_replicas
from pretrain.run.schedule import lower_rates
from pretrain.run.steps import HostCopy, Steps
from pretrain.run_folder import RunFolder
from pretrain.watch.logs import above_the_bar, is_writer, progress_bar
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.step_metrics import interval_metrics, training_flops
from pretrain.watch.straggler import StragglerWatch
from pretrain.watch.summary import Summary, describe_graphs, draw_run

_CHECK_EVERY_S = 0.25
_MOST_STEPS = 1000
_TROUBLE = 1000  # added to an errno, so it is larger than any signal
_INTERVALS = ("log_interval", "eval_interval", "save_interval", "check_replicas_interval")


class StoppedBySignal(SystemExit):
    """The ranks stopped together after a saved step. The code is 128 + the signal."""


class DivergedError(Exception):
    """Too many steps in a row had gradients that were not finite. ``remedy``: options to retry."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class RunFolderError(Exception):
    """The run folder is gone or cannot store metrics. A checkpoint without them is not saved."""


class StopAgreement:
    """Agrees on a signal that any rank received. All ranks call :meth:`agreed` after each step.

    Costs an all-reduce of two numbers about four times a second, and of one number at each save. A
    rank that stopped without this agreement would leave the others in a collective.
    """

    def __init__(self, device: torch.device, timeout: timedelta | None = None) -> None:
        # A collective on a device would wait for the steps that the device still has to do.
        is_cpu = device.type == "cpu"
        self._group = None if is_cpu else dist.new_group(timeout=timeout, backend="gloo")
        self._left = self._interval = 1
        self._began = time.perf_counter()

    def agreed(self, asked: Callable[[], int]) -> int:
        """Return the signal that a rank received, or 0 (also between two exchanges)."""
        self._left -= 1
        if self._left:
            return 0
        passed = time.perf_counter() - self._began
        steps = int(_CHECK_EVERY_S * self._interval / max(passed, 1e-9))
        found, self._interval = self._reduce_max(asked(), max(1, min(steps, _MOST_STEPS)))
        self._left, self._began = self._interval, time.perf_counter()
        return found

    def agreed_now(self, asked: Callable[[], int]) -> int:
        """Exchange now, without changing the time of the next exchange of :meth:`agreed`."""
        return self._reduce_max(asked())[0]

    def _reduce_max(self, *facts: int) -> list[int]:
        largest = torch.tensor(facts)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return [int(fact) for fact in largest.tolist()]


@dataclasses.dataclass(eq=False)
class Loop:
    """Steps, logs, validation and checkpoints in order; all ranks run it together.

    A device has up to two steps at once, so it never waits for the host: the host reads and logs a
    step while the device does the next one. Before a console line, a validation, a check, a save or
    an end, and after each step on a CPU, the host has read all steps. If a rank fails, the numbers
    of the last step before are missing in the log.
    """

    folder: RunFolder
    steps: Steps
    saver: Saver
    observed: GlobalState
    watch: StragglerWatch
    mlflow: JobRun | None
    signal: Callable[[], int]

    def __post_init__(self) -> None:
        self.settings = settings = self.steps.settings
        self.groups = self.steps.groups
        self.stop = StopAgreement(self.steps.device, timedelta(seconds=settings.timeout_s))
        # The trackers of experts and of a second token hold one step.
        asks_device = settings.experts or settings.mtp
        self.num_unread = 0 if self.steps.device.type == "cpu" or asks_device else 1
        # Else the log would compare the learning rates of all ranks on the device.
        self.log_groups = SimpleNamespace(dp=self.groups.dp) if self.num_unread else self.groups
        self.started: list[tuple[float, float, HostCopy]] = []
        self.progress: TrainState = self.observed.train_state
        self.skipped_in_a_row, self.first_step = 0, self.progress.step
        end = self.first_step + (settings.exit_after or settings.train_iters)
        self.last_step = 0 if settings.eval_only else min(end, settings.train_iters)
        self.summary = Summary(self.folder, settings, first_step=self.first_step)
        self.flops_per_step = training_flops(settings)
        self.totals: dict[str, Any] = {}
        self.report_memory, self.finished = True, [time.time()]

    def run(self) -> None:
        """Train to the last step.

        Raises StoppedBySignal after a checkpoint, DivergedError and RunFolderError without one.
        """
        try:
            self._train()
        except (StoppedBySignal, DivergedError, RunFolderError) as ended:
            # An error of a background save would hide the loss of the folder, its cause.
            lost = isinstance(ended, RunFolderError)
            with suppress(CheckpointingException) if lost else nullcontext():
                self.saver.wait()
            if isinstance(ended, DivergedError):
                self._draw()
            self.observed.close(status_of(ended))
            self.watch.close()
            raise
        self._draw()
        self.observed.close()
        self.watch.close()

    def _draw(self) -> None:
        if is_writer():
            attempt(lambda: draw_run(self.folder, self.steps.objective), "draw the run")

    def print_summary(self) -> None:
        """Print the results and the paths of all files, on the rank that writes logs."""
        self.summary.num_skipped = self.skipped_in_a_row
        if self.settings.cuda_graph != "none":
            self.summary.graphs = describe_graphs(self.steps.model)
        if is_writer():
            print("\n" + "\n".join(self.summary.lines(self.mlflow, self.watch)), flush=True)

    def _train(self) -> None:
        if self.settings.eval_only:
            self._validate()
        self.observed.timers("interval-time", log_level=0).start()
        with progress_bar(self.settings, self.first_step) as bar:
            while self.progress.step + len(self.started) < self.last_step:
                step = self._run_step()
                bar.update()
                if not self.started:
                    self.saver.poll()
                if _is_due(step, self.settings.check_replicas_interval):
                    check_replicas(self.steps.model, self.groups, step)
                if step == self.last_step or _is_due(step, self.settings.eval_interval):
                    self._validate()
                signal = self.stop.agreed(self._read_signal) if step < self.last_step else 0
                self._finish_steps(0 if signal else self.num_unread)
                self._raise_trouble(signal)
                if signal or step == self.last_step or _is_due(step, self.settings.save_interval):
                    self._save(step)
                if signal:
                    raise StoppedBySignal(128 + signal)
        self.saver.wait()

    def _save(self, step: int) -> None:
        """Save a checkpoint, unless the last step had no finite gradients."""
        if not self.skipped_in_a_row:
            self._raise_trouble(self.stop.agreed_now(self._flush))
            self.saver.save(step)

    def _raise_trouble(self, found: int) -> None:
        """Raise RunFolderError on all ranks if the agreed number is an error of a rank."""
        if found < _TROUBLE:
            return
        path, number = self.folder.path, found - _TROUBLE
        if number == errno.ENOENT:
            raise RunFolderError(
                f"the run folder {path} is gone: after step {self.progress.step} it has no "
                "config.json (deleted, moved or unmounted?), so nothing can be saved there. If it "
                "was moved, --resume it from its new place, else start a new run"
            )
        raise RunFolderError(
            f"cannot write {self.folder.metrics} ({os.strerror(number)}), so the checkpoint of "
            f"step {self.progress.step} is not saved: free some space, then continue"
        )

    def _read_signal(self) -> int:
        """The signal that this rank received. Rank 0 also checks that the run folder exists."""
        if dist.get_rank() == 0 and self.folder.is_gone():
            return _TROUBLE + errno.ENOENT
        return self.signal()

    def _count_skipped(self, skipped: bool) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        step, count = self.progress.step, self.skipped_in_a_row
        if skipped and (count == self.settings.max_skipped or step == self.last_step):
            steps = f"{count} steps in a row, to step {step}," if count > 1 else f"step {step}"
            raise DivergedError(
                f"the gradients of {steps} were not finite: try a lower --lr or --clip-grad",
                lower_rates(self.settings),
            )

    def _flush(self) -> int:
        """Write the logs up to a checkpoint to disk, for a later start from it.

        Returns an error number if the metrics cannot be written: the checkpoint would lose them.
        """
        try:
            for sink in self.observed.sinks():
                (sink.sink if isinstance(sink.sink, JsonlSink) else sink).flush()
        except OSError as error:
            return _TROUBLE + (error.errno or errno.EIO)
        return self._read_signal()

    def _run_step(self) -> int:
        """Start a step, log the steps that the host has to have read, and return its number."""
        step, began = self.progress.step + len(self.started) + 1, time.perf_counter()
        loss, norm, rate, _ = self.steps.train_step(step)
        self.started.append((began, rate, HostCopy(torch.stack([loss, norm]))))
        is_due = any(_is_due(step, getattr(self.settings, name)) for name in _INTERVALS)
        self._finish_steps(0 if is_due or step == self.last_step else self.num_unread)
        return step

    def _finish_steps(self, num_unread: int) -> None:
        """Count and log all started steps but the last ``num_unread``."""
        while len(self.started) > num_unread:
            self._finish_step(*self.started.pop(0))

    def _finish_step(self, began: float, rate: float, numbers: HostCopy) -> None:
        progress = self.progress
        loss, norm = numbers.read()
        skipped = not norm.isfinite()
        self.summary.end_step(began)
        progress.step += 1
        progress.consumed_train_samples += self.settings.global_batch_size
        progress.floating_point_operations_so_far += self.flops_per_step
        progress.skipped_train_samples += skipped * self.settings.global_batch_size
        self.finished.append(time.time())
        del self.finished[: -(self.observed.cfg.logger.throughput_window_size + 1)]
        with above_the_bar():
            self.report_memory = training_log(
                {self.steps.objective.loss_name: loss}, self.totals, rate, None, 1.0,
                self.report_memory, int(skipped), norm, None, None, self.observed.cfg,
                self.observed, self.finished, chunks_of(self.steps.model),
                pg_collection=self.log_groups, loaded_iteration=self.first_step,
                seq_length=self.settings.seq_length,
            )  # fmt: skip
        self._log_job_metrics(loss, norm)
        self._count_skipped(skipped)

    def _log_job_metrics(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Log metrics of this job, and show some on the detector's page."""
        metrics = {"step-time": self.finished[-1] - self.finished[-2]}
        self.watch.end_step()
        step = self.progress.step
        if step == self.last_step or _is_due(step, self.settings.log_interval):
            config = self.observed.cfg.model
            metrics |= interval_metrics(self.steps.model, config, self.groups, self.steps.device)
            self.watch.show(self.steps.objective.loss_name, loss, norm, metrics["step-time"])
            with above_the_bar():
                metrics |= self.watch.report(step)
        self.observed.log_metrics(metrics, versus_samples=False)

    def _validate(self) -> None:
        loss = self.summary.validation = self.steps.validation_loss()
        if not is_writer():
            return
        step, objective = self.progress.step, self.steps.objective
        self.observed.log_metrics({objective.validation_name: loss})
        line = f" validation loss at iteration {step} | {objective.loss_name} value: {loss:.6E} |"
        if objective.is_likelihood:
            line += f" {objective.loss_name} PPL: {math.exp(min(loss, 20.0)):.6E} |"
        with above_the_bar():
            print(line, flush=True)


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
