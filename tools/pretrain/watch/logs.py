"""The output of a run: console lines, TensorBoard, MLflow, JSONL, a progress bar."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from mcore.observe import (
    ConfigContainer,
    DatasetConfig,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    TrainState,
)
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.mlflow_run import JobRun

# A lock of threads is enough. tqdm's default lock of processes starts, from Python 3.14 on, a
# process that prints an error when a signal ends a rank.
tqdm.set_lock(threading.RLock())


def observe_run(
    settings: Settings, folder: RunFolder, train_state: TrainState, model_config: Any,
    mlflow: JobRun | None = None,
) -> GlobalState:  # fmt: skip
    """The state for ``training_log``. The last rank writes, the others have no sinks."""
    container = ConfigContainer(
        logger=LoggerConfig(
            log_interval=settings.log_interval, log_throughput=True,
            throughput_window_size=max(2, settings.log_interval),
            log_throughput_to_tensorboard=True, log_runtime_to_tensorboard=True,
            runtime_time_unit="seconds",
            tensorboard_dir=str(folder.tensorboard) if settings.tensorboard else None,
            run_dir=str(folder.path), resume_step=train_state.step or None,
        ),
        train=TrainingConfig(
            micro_batch_size=settings.rows_per_forward,
            global_batch_size=settings.global_batch_size, train_iters=settings.train_iters,
            num_microbatches=settings.num_microbatches, data_parallel_size=settings.dp,
        ),
        model=model_config, dataset=DatasetConfig(seq_length=settings.seq_length),
        data_parallel_size=settings.dp,
    )  # fmt: skip
    state = GlobalState(cfg=container, train_state=train_state)
    if mlflow is not None:
        state.mlflow_logger = mlflow.logger
    state.sinks()  # made now: a frozen process that continues must not take a later start's files
    return state


def is_writer() -> bool:
    """Whether this rank writes logs. The last rank does: it has the loss in every layout."""
    return dist.get_rank() == dist.get_world_size() - 1


def progress_bar(settings: Settings, done: int) -> tqdm[Any]:
    """A progress bar on the last rank. Hidden unless standard error is a terminal."""
    return tqdm(
        total=settings.train_iters, initial=done, unit="step", dynamic_ncols=True,
        disable=settings.quiet or not (is_writer() and sys.stderr.isatty()),
    )  # fmt: skip


def above_the_bar() -> AbstractContextManager[None]:
    """A context in which console lines are printed above the progress bar."""
    mode: AbstractContextManager[None] = tqdm.external_write_mode(file=sys.stdout)
    return mode
