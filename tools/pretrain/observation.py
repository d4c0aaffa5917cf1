"""What the run shows while it trains: console lines, TensorBoard, JSONL, a progress bar."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from mcore.observe import (
    ConfigContainer,
    DatasetConfig,
    GlobalState,
    JsonlSink,
    LoggerConfig,
    TrainingConfig,
    TrainState,
)
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings


def observe_run(
    settings: Settings, folder: RunFolder, train_state: TrainState, model_config: Any
) -> GlobalState:
    """The state that ``training_log`` reads; the last rank writes, the others have no sinks."""
    sinks = []
    if is_writer():
        _forget_later_steps(folder, train_state.step)
        sinks.append(JsonlSink(folder.metrics))
    container = ConfigContainer(
        logger=LoggerConfig(
            log_interval=settings.log_interval,
            log_throughput=True,
            log_throughput_to_tensorboard=True,
            tensorboard_dir=str(folder.tensorboard),
        ),
        train=TrainingConfig(
            micro_batch_size=settings.rows_per_forward,
            global_batch_size=settings.global_batch_size,
            train_iters=settings.train_iters,
            num_microbatches=settings.num_microbatches,
            data_parallel_size=settings.dp,
        ),
        model=model_config,
        dataset=DatasetConfig(seq_length=settings.seq_length),
        data_parallel_size=settings.dp,
    )
    return GlobalState(cfg=container, train_state=train_state, extra_sinks=sinks)


def is_writer() -> bool:
    """Whether this rank writes logs: the last one, which has the loss in every layout."""
    return dist.get_rank() == dist.get_world_size() - 1


def progress_bar(settings: Settings, done: int) -> tqdm[Any]:
    """A bar on the last rank where standard error is a terminal, else one that shows nothing."""
    return tqdm(
        total=settings.train_iters,
        initial=done,
        unit="step",
        dynamic_ncols=True,
        disable=not (is_writer() and sys.stderr.isatty()),
    )


def above_the_bar() -> AbstractContextManager[None]:
    """While it lasts, console lines go above the progress bar instead of into it."""
    mode: AbstractContextManager[None] = tqdm.external_write_mode(file=sys.stdout)
    return mode


def _forget_later_steps(folder: RunFolder, step: int) -> None:
    """Drop what an earlier start logged after the checkpoint that this one goes on from."""
    if not folder.metrics.exists():
        return
    kept = []
    for line in folder.metrics.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        if json.loads(line)["step"] <= step:
            kept.append(line)
    partial = folder.metrics.with_suffix(".jsonl.partial")
    partial.write_text("".join(kept))
    partial.replace(folder.metrics)
