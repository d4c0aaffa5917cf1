"""One rank's part of a run: builds and loads everything that the loop needs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist

from mcore.modules import Float16Module, MegatronModule, freeze_moe_router
from mcore.observe import (
    TrainState,
    configure_nvtx_profiling,
    get_moe_metrics_tracker,
    get_mtp_metrics_tracker,
)
from mcore.parallel import ProcessGroups
from pretrain.corpus import Corpus, load_text
from pretrain.model.configuration import ModelConfig, transformer_config
from pretrain.model.gpt import GPT, put_value_head
from pretrain.model.randomness import ParameterInit, seed_streams
from pretrain.model.stages import ModelChunks, count_parameters, log_stages, stages_of_rank
from pretrain.optim.adamw import TrainingOptimizer
from pretrain.optim.fully_sharded import FullyShardedOptimizer, shard_model, sharding_index
from pretrain.optim.main_weights import MainWeightOptimizer
from pretrain.run.checkpoints import CheckpointedState
from pretrain.run.loop import Loop
from pretrain.run.pipeline_steps import PipelineSteps
from pretrain.run.steps import Steps
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, SlowRank, read_fact, surroundings, write_settings
from pretrain.usage import UsageError
from pretrain.watch.logs import is_writer, observe_run
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.step_metrics import training_flops
from pretrain.watch.straggler import StepRanges, StragglerWatch
from pretrain.watch.summary import opening_lines


def train(
    settings: Settings,
    folder: RunFolder,
    device: torch.device,
    *,
    resume: Path | None,
    past_damage: bool = False,
    mlflow: JobRun | None = None,
    signal: Callable[[], int] = lambda: 0,
) -> None:
    """Train as one rank of an existing process group. All ranks call it together.

    ``folder`` exists. ``resume`` is the folder to continue, or None for a new run. ``past_damage``
    allows an older checkpoint if the last one is damaged. ``mlflow`` is set on the rank that
    writes logs. ``signal`` returns the signal that this rank has received, or 0.

    Raises StoppedBySignal or DivergedError if the run ends before its last step.
    """
    with open(os.devnull, "w") as nowhere:
        quiet = redirect_stdout(nowhere) if settings.quiet else nullcontext()
        with quiet:
            loop = build_loop(settings, folder, device, resume, past_damage, mlflow, signal)
            loop.run()
    loop.print_summary()


def build_loop(
    settings: Settings,
    folder: RunFolder,
    device: torch.device,
    resume: Path | None,
    past_damage: bool,
    mlflow: JobRun | None,
    signal: Callable[[], int],
) -> Loop:
    """The loop of ``train``, loaded and ready to run."""
    groups = ProcessGroups.from_sizes(
        tp=settings.tp, cp=settings.cp, pp=settings.pp, ep=settings.ep
    )
    corpus = load_text(settings, folder.path)
    _check_corpus(corpus, device)
    if resume is not None and settings.data:
        _check_same_text(corpus, folder)
    seed_streams(settings.seed, groups, device, for_graphs=settings.cuda_graph != "none")
    config = transformer_config(settings)
    model = build_model(settings, config, groups, device)
    optimizer = build_optimizer(settings, model, groups)
    get_moe_metrics_tracker().reset()
    get_mtp_metrics_tracker().reset()
    progress = TrainState()
    state = CheckpointedState(settings, model, optimizer, progress, groups, device)
    if resume is not None:
        state.load_latest(folder, past_damage=past_damage)
    _write_config(settings, folder, corpus, device)
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
        print("\n".join(opening_lines(settings, count, corpus, device, folder)), flush=True)
    if settings.pp > 1:
        log_stages(model, groups)
    return Loop(settings, folder, groups, steps, state, observed, watch, mlflow, signal)


def build_model(
    settings: Settings, config: ModelConfig, groups: ProcessGroups, device: torch.device
) -> MegatronModule:
    """The GPT, or this rank's stages of it, on ``device``, in bfloat16 if requested.

    Collective on the tp group.
    """
    init = ParameterInit(settings.seed, device, groups.tp)
    stages = stages_of_rank(
        settings.num_layers, rank=groups.rank("pp"), ranks=settings.pp, chunks=settings.vpp
    )
    models = [
        GPT(
            config,
            init,
            groups,
            vocabulary_size=settings.vocabulary_size,
            untied=settings.untied or settings.value_head,
            dropout=settings.dropout,
            recompute=settings.recompute,
            stage=stage,
        )
        for stage in stages
    ]
    if settings.value_head:
        put_value_head(models, config, init)
    chunks: list[MegatronModule] = list(models)
    if settings.freeze_router:
        freeze_moe_router(chunks)
    if settings.bf16 and not settings.fsdp:  # fully_shard casts from fp32 shards
        chunks = [
            Float16Module(config, model, vp_stage=number if settings.vpp > 1 else None)
            for number, model in enumerate(models)
        ]
    return chunks[0] if len(chunks) == 1 else ModelChunks(config, chunks)


def build_optimizer(
    settings: Settings, model: MegatronModule, groups: ProcessGroups
) -> TrainingOptimizer:
    """The optimizer of the model. With ``--fsdp`` shards the model. Collective on the world."""
    if not settings.fsdp:
        return MainWeightOptimizer(model, groups, weight_decay=settings.weight_decay)
    index = sharding_index(groups, settings.hsdp_outer)
    shard_model(model, index, bf16=settings.bf16)
    return FullyShardedOptimizer(
        model, groups, index, weight_decay=settings.weight_decay, bf16=settings.bf16
    )


def _write_config(
    settings: Settings, folder: RunFolder, corpus: Corpus, device: torch.device
) -> None:
    """Write ``config.json`` on rank 0. Raises UsageError on all ranks if the disk refuses it."""
    refused = torch.zeros((), dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        facts = [("corpus_crc32", corpus.checksum), ("started_with", surroundings())]
        try:
            write_settings(settings, folder.path, facts)
        except OSError as error:
            refused.fill_(error.errno or errno.EIO)
    dist.broadcast(refused, src=0)
    if refused:
        why = os.strerror(int(refused.item()))
        raise UsageError(f"cannot write config.json in {folder.path}: {why}")


def _check_corpus(corpus: Corpus, device: torch.device) -> None:
    """Raise UsageError on all ranks if their texts differ."""
    # The maxima of x and -x are equal in magnitude only if x is equal on all ranks.
    facts = torch.tensor([corpus.checksum, -corpus.checksum], device=device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    if facts[0] != -facts[1]:
        raise UsageError(
            "the ranks read different texts: start them all with the same Python version, or the "
            "same files of --data"
        )


def _check_same_text(corpus: Corpus, folder: RunFolder) -> None:
    """Raise UsageError if the text differs from the text of the run to resume."""
    before = read_fact(folder.path, "corpus_crc32")
    if before != corpus.checksum:
        raise UsageError(
            f"--data: its text (checksum {corpus.checksum}) differs from the text of the run to "
            f"resume ({before}), so its position has no meaning: start a new run"
        )
