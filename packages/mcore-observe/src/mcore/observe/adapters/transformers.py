"""Run log and comparison of ranks for the ``Trainer`` of transformers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore.observe.adapters.trainer_log import TrainerLog
from mcore.observe.extras import require_extra
from mcore.observe.files import replacing
from mcore.observe.runs.state import RunLog
from mcore.observe.sinks.scalars import as_number

require_extra("transformers", "mcore.observe.adapters.transformers")

from transformers import TrainerCallback  # noqa: E402

__all__ = ["ObserveCallback"]

_COUNTERS = "mcore_observe.json"  # in a checkpoint


class ObserveCallback(TrainerCallback):
    """Logs the metrics of a ``Trainer``, with a console line, and compares its ranks.

    Every rank of the job has one. The last rank writes. There is a line whenever the trainer logs
    (``logging_steps``), with its average loss. Evaluations and other metrics of the trainer are
    sent to the sinks. Samples and tokens are those of this rank's batches times the data-parallel
    ranks. Training that continues from a checkpoint continues its run. Another ``train()`` from
    step 0 gets a new folder (``-2``). The run ends with :meth:`close` or with the process, as
    failed if training was interrupted.

    Each forward pass of the model, and each wait for data between two steps, is timed and compared
    over the ranks about every five minutes. Collectives in the forward pass, as with FSDP, hide
    slow ranks. A model compiled by ``torch_compile`` is not timed.

    Args:
        run_dir: Folder of the run.
        straggler: Whether to compare ranks, or settings of
            :meth:`mcore.observe.StragglerDetector.configure`.
        settings: As for :class:`mcore.observe.RunLog`, except ``log_every``.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting does not exist.

    Example:
        >>> import tempfile
        >>> callback = ObserveCallback(tempfile.mkdtemp(), tensorboard=True)
        >>> trainer = Trainer(model, args, callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        straggler: bool | Mapping[str, Any] = True,
        **settings: Any,
    ) -> None:
        self._runs = TrainerLog(run_dir, straggler, {**settings, "log_every": 1})
        self._tokens_seen = 0

    @property
    def run_log(self) -> RunLog:
        """The log of the present run."""
        return self._runs.log

    def close(self, status: str = "FINISHED") -> None:
        """End the run before the process ends. A second call does nothing.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.
        """
        self._runs.close(status)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the run, or continue the run of a checkpoint."""
        self._tokens_seen = state.num_input_tokens_seen
        self._runs.begin(
            state.global_step,
            _read_counters(args, state.global_step),
            args.to_dict(),
            train_iters=state.max_steps,
        )
        if others.get("model") is not None and not args.torch_compile:
            self._runs.watch_forward(others["model"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start to wait for data."""
        self._runs.begin_wait()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the wait for data."""
        if not self._runs.is_training:  # the callback was added during training
            self.on_train_begin(args, state, control, **others)
        self._runs.end_wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Count a step, and compare the ranks if it is time."""
        self._count_steps(args, state)
        self._runs.report_ranks()
        self._runs.begin_wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Log the metrics of the trainer, with a line if they have a loss."""
        numbers = dict(logs or {})
        step = state.global_step
        if self._runs.is_training:  # another callback may log before our on_step_end
            self._count_steps(args, state)
        elif step > self.run_log.train_state.step:  # training ran without this callback
            self.run_log.load_state_dict({**_read_counters(args, step), "step": step})
        if "loss" not in numbers or not self._runs.has_unlogged_steps:
            self.run_log.log_metrics(numbers)
            return
        self.run_log.train_state.floating_point_operations_so_far = as_number(state.total_flos) or 0
        tokens = state.num_input_tokens_seen - self._tokens_seen
        self._tokens_seen = state.num_input_tokens_seen
        self._runs.end_wait(is_data=False, is_step=True)  # the trainer waited for the device
        self._runs.log_line(
            {"loss": numbers.pop("loss")},
            _count_dp_ranks(args),
            lr=numbers.pop("learning_rate", None),
            grad_norm=numbers.pop("grad_norm", None),
            tokens=tokens or None,
            scalars=numbers,
        )
        self._runs.begin_wait()

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the evaluation out of the step time."""
        self._runs.begin_wait()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the counters to a checkpoint, and leave the save out of the step time."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if args.should_save and folder.is_dir():
            counters = {name: value.item() for name, value in self.run_log.state_dict().items()}
            with replacing(folder / _COUNTERS) as file:
                file.write(json.dumps(counters).encode() + b"\n")
        self._runs.begin_wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the training. Evaluations may follow."""
        self._runs.finish()

    def _count_steps(self, args: Any, state: Any) -> None:
        """Count the steps that have ended since the last call."""
        steps = state.global_step - self.run_log.train_state.step
        if steps > 0:
            ranks = _count_dp_ranks(args)
            # A resumed state has the checkpoint's batch size, but training uses that of args.
            size = state.train_batch_size if args.auto_find_batch_size else None
            batch = (size or args.train_batch_size) * args.gradient_accumulation_steps
            self._runs.end_step(ranks, steps=steps, most_samples=steps * batch * ranks)


def _count_dp_ranks(args: Any) -> int:
    layout = getattr(args, "parallelism_config", None)
    sizes = (getattr(layout, name, 1) for name in ("tp_size", "cp_size", "sp_size"))
    return max(int(args.world_size) // math.prod(sizes), 1)


def _read_counters(args: Any, step: int) -> dict[str, Any]:
    """Return the counters of a step's checkpoint, or estimate them from the settings."""
    path = Path(args.output_dir, f"checkpoint-{step}", _COUNTERS)
    try:  # the read of a pipe would wait for ever
        found = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    batch = args.train_batch_size * args.gradient_accumulation_steps * _count_dp_ranks(args)
    return {"consumed_train_samples": step * batch}
