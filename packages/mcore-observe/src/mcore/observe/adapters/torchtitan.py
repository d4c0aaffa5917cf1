"""Run log and comparison of ranks for torchtitan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from mcore.observe.adapters.trainer_log import TrainerLog
from mcore.observe.extras import require_extra
from mcore.observe.runs.state import RunLog
from mcore.observe.sinks.delivery.process_end import status_of
from mcore.observe.training_log.log import log_state_of

require_extra("torchtitan", "mcore.observe.adapters.torchtitan")

from torchtitan.components.metrics import BaseLogger  # noqa: E402

__all__ = ["ObserveLogger"]

_LOSS = "loss_metrics/global_avg_loss"
_WAIT = "time_metrics/data_loading(s)"  # the average of the steps


class ObserveLogger(BaseLogger):
    """A logger for torchtitan's ``MetricsProcessor``, with a console line and a rank comparison.

    Every rank makes one, since all ranks log. The last rank writes. There is a line whenever
    torchtitan logs (``log_freq``), with its loss of that step and the tokens it has seen. A first
    line after step 1 continues the run from its checkpoint: metrics from that step on are dropped
    if possible. The run ends with ``close``, as failed if an exception is being handled.

    Ranks are compared at each line by the forward passes of the model. Collectives in the forward
    pass, as with FSDP, hide slow ranks.

    Args:
        run_dir: Folder of the run.
        model: The model to time. None times nothing.
        straggler: Whether to compare ranks, or settings of
            :meth:`mcore.observe.StragglerDetector.configure`.
        settings: As for :class:`mcore.observe.RunLog`, except ``log_every``.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting does not exist.

    Example:
        >>> import tempfile
        >>> logger = ObserveLogger(tempfile.mkdtemp(), seq_length=2048)
        >>> trainer.metrics_processor.logger = logger  # doctest: +SKIP
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module | None = None,
        straggler: bool | Mapping[str, Any] = True,
        **settings: Any,
    ) -> None:
        self._runs = TrainerLog(
            run_dir, straggler and model is not None, {**settings, "log_every": 1}
        )
        self._seq_length = settings.get("seq_length") or 1
        self._model = model
        self._tokens_seen = 0
        self._has_begun = False
        self._early: list[tuple[Mapping[str, Any], int]] = []  # before the first line of a resume

    @property
    def run_log(self) -> RunLog:
        """The log of the run."""
        return self._runs.log

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the values of a processor, with a line if they have a training loss.

        Args:
            metrics: Numbers by name.
            step: The step.
        """
        values, last = dict(metrics), self.run_log.train_state.step
        seen = int(values.get("n_tokens_seen") or self._tokens_seen)
        if _LOSS in values and (not self._has_begun or step < last):
            self._has_begun = True
            self._tokens_seen = seen - seen // max(step, 1)  # every step has the same number
            counters = {"consumed_train_samples": self._tokens_seen // self._seq_length}
            self._runs.begin(max(step, 1) - 1, counters, {}, is_timed=False)
            if self._model is not None:
                self._runs.watch_forward(self._model)
            last = self.run_log.train_state.step
            self._log_early()
        steps = step - last
        if _LOSS not in values and not self._has_begun and step > 1:
            # torchtitan logs step 1 of a new run: this one continues, at a step not known yet.
            self._early.append((values, step))
            return
        if _LOSS not in values or not steps:
            self.run_log.log_metrics(values, step=step)  # a validation may be between two lines
            return
        tokens, self._tokens_seen = seen - self._tokens_seen, seen
        self._runs.end_step(1, steps=steps, samples=tokens // self._seq_length)
        log_state_of(self._runs.log).meter.add_wait(values.get(_WAIT, 0.0) * steps)
        self._runs.log_line(
            {"loss": values.pop(_LOSS)},
            1,
            lr=values.pop("lr", None),
            grad_norm=values.pop("grad_norm", None),
            tokens=tokens or None,
            scalars=values,
        )
        if self._runs.detector is not None:
            self._runs.detector.report(0.0, steps)

    def close(self) -> None:
        """End the run, as failed or killed if an exception is being handled."""
        self._log_early()
        self._runs.close(status_of(sys.exc_info()[1]))

    def _log_early(self) -> None:
        for values, step in self._early:
            self.run_log.log_metrics(values, step=step)
        self._early.clear()
