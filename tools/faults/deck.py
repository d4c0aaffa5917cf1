"""What can happen to a run, in which of its phases, and a seeded order of all of it."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

RANKS = 2
STEPS = 24
_TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --dropout 0.1 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --eval-interval 5 --log-interval 3 "
    f"--save-interval 4 --no-straggler --grace-s 5 --train-iters {STEPS}"
)


@dataclass(frozen=True)
class Variant:
    """The options of a run, beside the size of its model."""

    name: str
    options: str
    mlflow: bool = False
    small_disk: bool = False

    @property
    def words(self) -> list[str]:
        """The command line."""
        tracker = "" if self.mlflow else "--no-mlflow"
        return shlex.split(f"{_TINY} {tracker} {self.options}")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("dp2", "--dp 2 --no-tensorboard"),
        Variant("tp2", "--tp 2 --sequence-parallel --recompute"),
        Variant("fsdp", "--fsdp --keep-last 2 --no-tensorboard"),
        Variant("async", "--dp 2 --async-save --keep-last 2 --no-tensorboard"),
        Variant("pp2", "--pp 2 --num-layers 2 --micro-batch-size 2 --no-tensorboard"),
        Variant("ep2", "--dp 2 --experts 4 --ep 2 --topk 2 --no-tensorboard"),
        Variant("disk", "--dp 2 --save-interval 16", small_disk=True),
        Variant("mlflow", "--dp 2 --no-tensorboard", mlflow=True),
    )
}
_COMMON = ("dp2", "pp2", "tp2", "ep2", "fsdp", "async")


@dataclass(frozen=True)
class Phase:
    """A part of a run: the functions that do it, on which ranks and how often.

    Attributes:
        name: in tables.
        places: ``module:Class.function``; a fault comes just before its call, or as ``how`` says.
        hits: the most calls that one start of the run surely makes.
        ranks: those that call it.
        variants: the runs that have it.
        how: ``before``, ``after``, or ``gradient``: when that of its result is computed.
        is_last: whether the run has done all its steps by then.
    """

    name: str
    places: tuple[str, ...]
    hits: int = 6
    ranks: tuple[int, ...] = (0, 1)
    variants: tuple[str, ...] = _COMMON
    how: str = "before"
    is_last: bool = False


_SAVE = "mcore.parallel.checkpoint.files"
_SAVES = ("dp2", "pp2", "tp2", "ep2", "fsdp")
_FORWARD = ("pretrain.run.steps:Steps._loss", "pretrain.run.pipeline_steps:_Work.forward")
_ALL_TO_ALL = "pretrain.model.experts:all_to_all"
# One row for each phase; a phase that the job gains is a row more.
PHASES = (
    Phase("start", ("pretrain.rank:join",), 1),
    Phase("group made", ("pretrain.rank:agree_on_folder",), 1),
    Phase("build", ("pretrain.run.training:build_optimizer",), 1),
    Phase("load", ("pretrain.run.checkpoints:CheckpointedState.load",), 1),
    Phase("data", ("pretrain.corpus:Corpus.training_batch",)),
    Phase("forward", _FORWARD),
    Phase("pipeline send", ("pretrain.run.pipeline:Pipeline._send",), variants=("pp2",)),
    Phase("pipeline receive", ("pretrain.run.pipeline:_Arriving.wait",), variants=("pp2",)),
    Phase("tokens to experts", (_ALL_TO_ALL,), variants=("ep2",)),
    Phase("gradients of experts", (_ALL_TO_ALL,), variants=("ep2",), how="gradient"),
    Phase("backward", _FORWARD, how="gradient"),
    Phase(
        "reduction",
        (
            "pretrain.optim.main_weights:MainWeightOptimizer.reduce_gradients",
            "pretrain.optim.fully_sharded:FullyShardedOptimizer.reduce_gradients",
        ),
    ),
    Phase(
        "optimizer",
        (
            "pretrain.optim.main_weights:MainWeightOptimizer.step",
            "pretrain.optim.fully_sharded:FullyShardedOptimizer.step",
        ),
    ),
    Phase("log", ("pretrain.run.loop:training_log",)),
    Phase("validation", ("pretrain.run.steps:Steps.validation_loss",), 1),
    Phase("save", ("pretrain.run.checkpoints:CheckpointedState.save",), 2),
    Phase("save: files", (f"{_SAVE}.writer:DurableWriter.write",), 2, variants=_SAVES),
    Phase("save: manifest", (f"{_SAVE}.writer:DurableWriter.publish",), 2, (0,), _SAVES),
    Phase("save: rename", (f"{_SAVE}.save_place:publish",), 2, (0,), _SAVES),
    Phase("saved", ("pretrain.run.checkpoints:CheckpointedState.save",), 2, how="after"),
    Phase("async save: files", (f"{_SAVE}.writer:DurableWriter.write",), 2, variants=("async",)),
    Phase("async save: manifest", (f"{_SAVE}.writer:DurableWriter.publish",), 2, (0,), ("async",)),
    Phase("async save: rename", (f"{_SAVE}.save_place:publish",), 2, (0,), ("async",)),
    Phase("async save: joined", ("pretrain.run.saving:Saver.wait",), 2, variants=("async",)),
    Phase("deletion of old ones", ("pretrain.run.saving:keep_last",), 1, (0,), ("fsdp", "async")),
    Phase("close", ("mcore.observe:GlobalState.close",), 1, is_last=True),
    Phase("leave", ("torch.distributed:destroy_process_group",), 1, is_last=True),
)

KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP for good",
    "stop and continue": "SIGSTOP, continued when the next start is under way",
    "exception": "an exception",
    "exit": "`os._exit(7)`",
    "abort": "SIGABRT",
    "memory": "MemoryError",
    "slow": "one rank two seconds late",
    "launcher": "SIGKILL of the launcher",
    "node": "SIGKILL of a node's torchrun and rank, started again",
    "full disk": "no space left, until the job has ended",
    "full disk for a moment": "no space left, for a dozen steps",
    "tracker away": "MLflow's server killed, back at the next start",
    "tracker restarted": "MLflow's server killed and started again",
    "flipped bit": "in the newest checkpoint",
    "truncated file": "in the newest checkpoint",
    "no manifest": "in the newest checkpoint",
}
FATAL = ("kill", "stop", "stop and continue", "exception", "exit", "abort", "memory")
DAMAGES = ("flipped bit", "truncated file", "no manifest")
# What does not end the job by itself.
HARMLESS = (
    "slow", "full disk", "full disk for a moment", "tracker away", "tracker restarted",
)  # fmt: skip
_KINDS_UNDER = {"command": (*FATAL, "launcher"), "agents": ("node", "kill", "exception")}
_ON_DISKS = ("data", "log", "validation", "save", "save: files", "save: manifest", "close")
_ON_TRACKERS = ("start", "forward", "log", "save", "close")


@dataclass(frozen=True)
class Fault:
    """One thing that happens: in a phase of a rank at its n-th call, or between two starts."""

    kind: str
    phase: str
    rank: int
    hit: int
    variants: tuple[str, ...]

    @property
    def is_fatal(self) -> bool:
        """Whether it ends the job."""
        return self.kind not in HARMLESS

    def __str__(self) -> str:
        where = f"rank {self.rank}, {self.phase}"
        return f"{self.kind} ({where}{f', call {self.hit}' if self.hit > 1 else ''})"


def phase_of(name: str) -> Phase:
    """The row of a phase."""
    return next(phase for phase in PHASES if phase.name == name)


def shuffled(seed: int, *, with_disk: bool = True, launcher: str = "forked") -> Iterator[Fault]:
    """Every fault in every phase of every rank, in the order of a seed, again and again."""
    source = random.Random(f"{seed} {launcher}")
    while True:
        faults = list(all_faults(source, with_disk, launcher))
        source.shuffle(faults)
        yield from faults


def all_faults(source: random.Random, with_disk: bool, launcher: str) -> Iterator[Fault]:
    """Every fault once, at calls that are drawn from the source."""

    def at(kind: str, phase: Phase, variants: tuple[str, ...]) -> Iterator[Fault]:
        for rank in phase.ranks:
            yield Fault(kind, phase.name, rank, source.randint(1, phase.hits), variants)

    kinds = _KINDS_UNDER.get(launcher, (*FATAL, "slow"))
    for phase in PHASES:
        for kind in kinds:
            if phase.name == "leave" and kind.startswith("stop"):
                continue  # the other ranks have left: only who watches the machine would notice
            yield from at(kind, phase, phase.variants)
        if launcher != "forked":
            continue
        if with_disk and phase.name in _ON_DISKS:
            for kind in ("full disk", "full disk for a moment", "kill"):
                yield from at(kind, phase, ("disk",))
        if phase.name in _ON_TRACKERS:
            for kind in ("tracker away", "tracker restarted"):
                yield Fault(kind, phase.name, RANKS - 1, source.randint(1, phase.hits), ("mlflow",))
                yield Fault(
                    source.choice(FATAL), phase.name, source.choice(phase.ranks),
                    source.randint(1, phase.hits), ("mlflow",),
                )  # fmt: skip
    # Done between two starts of ours; torchrun makes its own.
    for kind in DAMAGES if launcher in ("forked", "command") else ():
        for phase in (p for p in PHASES if p.name in ("forward", "save", "saved", "validation")):
            yield from at(kind, phase, phase.variants)
