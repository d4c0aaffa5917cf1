"""A dozen steps by the training log of Megatron-Bridge and by mcore's: ``log_steps.py FOLDER``.

The folders ``theirs`` and ``ours`` in it get the files of TensorBoard, and the printed lines as
``console.txt``. Both logs read a clock on which each step takes half a second. At the end it prints
the CPU time of mcore's calls in times of Bridge's.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bridge_on_cpu  # noqa: F401 - before megatron.bridge
import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config as bridge
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.bridge.training.utils.train_utils import training_log as theirs
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from mcore.observe import training_log as ours

STEPS, BATCH, LENGTH, WINDOW = 12, 8, 1 << 14, 4
# A loss that is not a number, the same in a skipped step, and an interval of skipped steps. From
# the second interval on, the second loss is negative.
NAN, NAN_SKIPPED, FIRST_SKIPPED = 5, 8, 10
SWITCHES = (
    *("log_throughput", "log_throughput_to_tensorboard", "log_timers_to_tensorboard"),
    *("log_memory_to_tensorboard", "log_runtime_to_tensorboard", "log_world_size_to_tensorboard"),
)


class Clock:
    """A clock that only :meth:`advance` moves."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def read(self) -> float:
        return self.now_s

    def advance(self) -> None:
        self.now_s += 0.25


def run(log: Callable[..., bool], folder: Path, steps: int, work: Callable[[], Any]) -> float:
    """Call a log after each step, with the configuration, counters and timers of Bridge.

    Returns the CPU time of the calls in seconds.
    """
    state, totals, stamps = GlobalState(), {}, collections.deque(maxlen=WINDOW + 1)
    state.cfg = config = make_config(folder, steps)
    model, reports, spent_s = [torch.nn.Linear(4, 4)], True, 0.0
    state.timers("interval-time", log_level=0).start()
    for step in range(1, steps + 1):
        for timer in "forward-backward", "optimizer":
            state.timers(timer, log_level=1).start()
            work()
            state.timers(timer).stop()
        skips = step == NAN_SKIPPED or FIRST_SKIPPED <= step <= STEPS
        progress = state.train_state
        progress.step = step
        progress.consumed_train_samples += BATCH
        progress.skipped_train_samples += BATCH * skips
        progress.floating_point_operations_so_far += num_floating_point_operations(config, BATCH)
        stamps.append(time.time())
        losses = {"lm loss": 3 - step / 7, "z loss": (3.5 - step) / 9}
        if step in (NAN, NAN_SKIPPED):
            losses["lm loss"] = float("nan")
        tensors = {name: torch.tensor([loss]) for name, loss in losses.items()}
        spent_s -= time.thread_time()
        reports = log(
            tensors, totals, 1e-3 / step, 1e-4 / step, 2.0**step, reports, int(skips),
            None if skips else step / 3, step * 1.1, step % 4, config, state, stamps, model,
            log_max_attention_logit=step / 2,
        )  # fmt: skip
        spent_s += time.thread_time()
        assert reports == (step < 3)
    state.tensorboard_logger.close()
    return spent_s


def make_config(folder: Path, steps: int) -> bridge.ConfigContainer:
    config = bridge.ConfigContainer(
        train=bridge.TrainingConfig(micro_batch_size=2, global_batch_size=BATCH, train_iters=steps),
        model=GPTModelProvider(
            num_layers=2, hidden_size=32, num_attention_heads=4, kv_channels=8, vocab_size=64,
            num_query_groups=4, ffn_hidden_size=128, seq_length=LENGTH,
        ),
        optimizer=bridge.OptimizerConfig(lr=1e-3, decoupled_lr=1e-4),
        scheduler=bridge.SchedulerConfig(),
        dataset=SimpleNamespace(seq_length=LENGTH),
        logger=bridge.LoggerConfig(
            log_interval=3, tensorboard_dir=str(folder), timing_log_level=1,
            timing_log_option="max", throughput_window_size=WINDOW, **dict.fromkeys(SWITCHES, True),
        ),
        tokenizer=None,
        checkpoint=bridge.CheckpointConfig(),
    )  # fmt: skip
    config.data_parallel_size = 1
    return config


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(0, None, BATCH, 2, 1)
    logs = {"theirs": theirs, "ours": ours}
    for name, log in logs.items():
        clock = Clock()
        (folder / name).mkdir()
        with (
            mock.patch("time.time", clock.read),
            (folder / name / "console.txt").open("w") as console,
            contextlib.redirect_stdout(console),
        ):
            run(log, folder / name, STEPS, clock.advance)
    spent_s = dict.fromkeys(logs, 0.0)
    for number in range(5):
        for name, log in logs.items():
            with contextlib.redirect_stdout(None):
                spent_s[name] += run(log, folder / f"{name}{number}", 100, lambda: None)
    sys.stdout.write(f"{spent_s['ours'] / spent_s['theirs']:.2f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
