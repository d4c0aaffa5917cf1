"""One rank's part of a run: everything that the loop needs, built and loaded in order."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mcore.observe import TrainState, configure_nvtx_profiling
from mcore.parallel import ProcessGroups
from pretrain.checkpoints import CheckpointedState, latest_step
from pretrain.corpus import Corpus, load_corpus
from pretrain.flops import training_flops
from pretrain.loop import Loop
from pretrain.mlflow_run import JobRun
from pretrain.model_build import build_model, build_optimizer, transformer_config
from pretrain.observation import forget_later_logs, is_writer, observe_run
from pretrain.random_streams import seed_streams
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, write_settings
from pretrain.slow_rank import SlowRank
from pretrain.step_ranges import StepRanges
from pretrain.steps import Steps
from pretrain.straggler_watch import StragglerWatch
from pretrain.usage import UsageError


def train(
    settings: Settings,
    folder: RunFolder,
    device: torch.device,
    *,
    resume: Path | None,
    mlflow: JobRun | None = None,
) -> None:
    """Train as one rank of a process group that exists; all ranks call it together.

    Args:
        settings: the run, equal on all ranks.
        folder: where the run writes; it exists.
        device: this rank's device.
        resume: the run folder to continue, or None for a new run.
        mlflow: the MLflow run, on the rank that writes logs; None elsewhere, and without MLflow.
    """
    groups = ProcessGroups.from_sizes(tp=settings.tp, cp=settings.cp)
    corpus = load_corpus()
    _check_corpus(corpus, device)
    seed_streams(settings.seed, groups, device)
    config = transformer_config(settings)
    model = build_model(settings, config, groups, device)
    optimizer = build_optimizer(settings, model, groups)
    progress = TrainState()
    state = CheckpointedState(settings, model, optimizer, progress, groups, device)
    if resume is not None:
        state.load(folder.checkpoint(latest_step(folder)))
    if dist.get_rank() == 0:
        write_settings(settings, folder.path, [("corpus_crc32", corpus.checksum)])
    watch = StragglerWatch(settings, folder, device, training_flops(settings))
    configure_nvtx_profiling(settings.nvtx)
    slow = SlowRank.parse(settings.slow_rank, settings.world_size)
    ranges = StepRanges(watch.detector, slow, device)
    steps = Steps(settings, model, optimizer, corpus, groups, device, ranges)
    if is_writer():
        forget_later_logs(folder, progress)
    observed = observe_run(settings, folder, progress, config, mlflow)
    Loop(settings, folder, groups, steps, state, observed, watch, mlflow).run()


def _check_corpus(corpus: Corpus, device: torch.device) -> None:
    """Raise UsageError on all ranks where their texts differ."""
    facts = torch.tensor([corpus.checksum, -corpus.checksum], device=device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    if facts[0] != -facts[1]:
        raise UsageError(
            "the ranks read different texts: start them all with the same Python version"
        )
