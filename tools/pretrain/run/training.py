"""One rank's part of a run: builds and loads everything that the loop needs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch

from mcore.observe import (
    TrainState,
    configure_nvtx_profiling,
    get_moe_metrics_tracker,
    get_mtp_metrics_tracker,
)
from mcore.parallel import ProcessGroups
from pretrain.corpus import check_same_text, load_text
from pretrain.model.building import build_model, build_optimizer
from pretrain.model.configuration import transformer_config
from pretrain.model.randomness import seed_streams
from pretrain.model.stages import count_parameters, log_stages
from pretrain.run.checkpoints import CheckpointedState, find_weights, load_weights
from pretrain.run.loop import DivergedError, Loop
from pretrain.run.pipeline_steps import PipelineSteps
from pretrain.run.saving import Saver, write_config
from pretrain.run.steps import Steps
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, SlowRank, last_reset
from pretrain.watch.logs import is_writer, observe_run
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.step_metrics import training_flops
from pretrain.watch.straggler import StepRanges, StragglerWatch
from pretrain.watch.summary import opening_lines


def train(
    settings: Settings, folder: RunFolder, device: torch.device, *, resume: Path | None,
    past_damage: bool = False, mlflow: JobRun | None = None, signal: Callable[[], int] = lambda: 0,
) -> None:  # fmt: skip
    """Train as one rank of an existing process group. All ranks call it together.

    ``folder`` exists. ``resume`` is the folder to continue, or None for a new run. ``past_damage``
    allows an older checkpoint if the last one is damaged. ``mlflow`` is set on the rank that
    writes logs. ``signal`` returns the signal that this rank has received, or 0.

    Raises StoppedBySignal or DivergedError if the run ends before its last step.
    """
    with open(os.devnull, "w") as nowhere:
        quiet = redirect_stdout(nowhere) if settings.quiet else nullcontext()
        try:
            with quiet:
                loop = build_loop(settings, folder, device, resume, past_damage, mlflow, signal)
                loop.run()
        except DivergedError:
            loop.print_summary()
            raise
    loop.print_summary()


def build_loop(
    settings: Settings, folder: RunFolder, device: torch.device, resume: Path | None,
    past_damage: bool, mlflow: JobRun | None, signal: Callable[[], int],
) -> Loop:  # fmt: skip
    """The loop of ``train``, loaded and ready to run."""
    groups = ProcessGroups.from_sizes(
        tp=settings.tp, cp=settings.cp, pp=settings.pp, ep=settings.ep
    )
    known_text = None if settings.reset_data else resume
    corpus = load_text(settings, folder.path, known_text)
    check_same_text(corpus, device, known_text if settings.data else None)
    seed_streams(settings.seed, groups, device, for_graphs=settings.cuda_graph != "none")
    config = transformer_config(settings)
    model = build_model(settings, config, groups, device)
    if settings.init_from and resume is None:
        load_weights(model, groups, find_weights(settings))
    optimizer = build_optimizer(settings, model, groups)
    get_moe_metrics_tracker().reset()
    get_mtp_metrics_tracker().reset()
    progress = TrainState()
    state = CheckpointedState(settings, model, optimizer, progress, groups, device)
    if resume is not None:
        state.load_latest(folder, past_damage=past_damage)
        if progress.step <= last_reset(resume):  # its count is of the text before
            settings = dataclasses.replace(settings, reset_data=True)
    if settings.reset_data:
        progress.consumed_train_samples = 0
    taken = progress.step * settings.global_batch_size
    corpus = dataclasses.replace(corpus, surplus=progress.consumed_train_samples - taken)
    write_config(settings, folder, corpus.checksum, progress.step)
    flops = training_flops(settings)
    watch = StragglerWatch(
        settings, folder, device, flops, lambda: mlflow is not None and mlflow.is_starting
    )
    configure_nvtx_profiling(settings.nvtx)
    slow = SlowRank.parse(settings.slow_rank, settings.world_size)
    ranges = StepRanges(watch.detector, slow, device, in_step=settings.pp == 1, waits=watch.waits)
    kind = Steps if settings.pp == 1 else PipelineSteps
    steps = kind(settings, model, optimizer, corpus, groups, device, ranges)
    observed = observe_run(settings, folder, progress, config, mlflow)
    count = count_parameters(model, groups)
    if is_writer():
        lines = opening_lines(settings, count, corpus, device, folder, progress.step)
        print("\n".join(lines), flush=True)
    if settings.pp > 1:
        log_stages(model, groups)
    return Loop(folder, steps, Saver(folder, state), observed, watch, mlflow, signal)
