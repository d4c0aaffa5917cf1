"""The faults of a run, its phases, and a seeded order of all faults in all phases."""

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
    """The options of a run, in addition to the size of its model."""

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
        Variant("inside", "--dp 2 --data room --no-tensorboard"),  # in the folder of its text
        Variant("tp2", "--tp 2 --sequence-parallel --recompute"),
        Variant("fsdp", "--fsdp --keep-last 2 --no-tensorboard"),
        Variant("async", "--dp 2 --async-save --keep-last 2 --no-tensorboard"),
        Variant("pp2", "--pp 2 --num-layers 2 --micro-batch-size 2 --no-tensorboard"),
        Variant("ep2", "--dp 2 --experts 4 --ep 2 --topk 2 --no-tensorboard"),
        Variant("disk", "--dp 2 --save-interval 16", small_disk=True),
        Variant("mlflow", "--dp 2 --no-tensorboard", mlflow=True),
    )
}
_SAVES = ("dp2", "inside", "pp2", "tp2", "ep2", "fsdp")
_COMMON = (*_SAVES, "async")


@dataclass(frozen=True)
class Phase:
    """A part of a run: the functions that do it, on which ranks and how often.

    Attributes:
        name: in tables.
        places: the functions, as ``module:Class.function``.
        hits: the number of calls that every start of the run reaches.
        ranks: the ranks that call it.
        variants: the runs that have it.
        how: a fault happens ``before`` the call, ``after`` it, when the ``gradient`` of its
            result is computed, or before the call of the ``last step``.
        is_last: whether the run has finished its steps before.
    """

    name: str
    places: tuple[str, ...]
    hits: int = 6
    ranks: tuple[int, ...] = (0, 1)
    variants: tuple[str, ...] = _COMMON
    how: str = "before"
    is_last: bool = False


_SAVE = "mcore.parallel.checkpoint"
FORWARD = ("pretrain.run.steps:Steps._compute_loss", "pretrain.run.pipeline_steps:_Work.forward")
_OPTIMIZERS = (
    "pretrain.optim.main_weights:MainWeightOptimizer",
    "pretrain.optim.fully_sharded:FullyShardedOptimizer",
)
_ALL_TO_ALL = "pretrain.model.experts:all_to_all"
# A new phase of the job is a new row.
PHASES = (
    Phase("start", ("pretrain.rank:join",), 1),
    Phase("group made", ("pretrain.rank:agree_on_folder",), 1),
    Phase("build", ("pretrain.run.training:build_optimizer",), 1),
    Phase("load", ("pretrain.run.checkpoints:CheckpointedState.load",), 1),
    Phase("data", ("pretrain.corpus:Corpus.training_batch",)),
    Phase("forward", FORWARD),
    Phase("pipeline send", ("pretrain.run.pipeline:Pipeline._send",), variants=("pp2",)),
    Phase("pipeline receive", ("pretrain.run.pipeline:_Arriving.wait",), variants=("pp2",)),
    Phase("tokens to experts", (_ALL_TO_ALL,), variants=("ep2",)),
    Phase("gradients of experts", (_ALL_TO_ALL,), variants=("ep2",), how="gradient"),
    Phase("backward", FORWARD, how="gradient"),
    Phase("reduction", tuple(f"{optimizer}.reduce_gradients" for optimizer in _OPTIMIZERS)),
    Phase("optimizer", tuple(f"{optimizer}.step" for optimizer in _OPTIMIZERS)),
    Phase("log", ("pretrain.run.loop:training_log",)),
    Phase("validation", ("pretrain.run.steps:Steps.validation_loss",), 1),
    Phase("save", ("pretrain.run.checkpoints:CheckpointedState.save",), 2),
    Phase("save: files", (f"{_SAVE}.save:write_file",), 2, variants=_SAVES),
    Phase("save: manifest", (f"{_SAVE}.save:_publish",), 2, (0,), _SAVES),
    Phase("save: rename", (f"{_SAVE}.files.directory:publish",), 2, (0,), _SAVES),
    Phase("saved", ("pretrain.run.checkpoints:CheckpointedState.save",), 2, how="after"),
    Phase("async save: files", (f"{_SAVE}.save:write_file",), 2, variants=("async",)),
    Phase("async save: manifest", (f"{_SAVE}.save:_publish",), 2, (0,), ("async",)),
    Phase("async save: rename", (f"{_SAVE}.files.directory:publish",), 2, (0,), ("async",)),
    Phase("async save: joined", ("pretrain.run.saving:Saver.wait",), 2, variants=("async",)),
    Phase("deletion of old ones", ("pretrain.run.saving:keep_last",), 1, (0,), ("fsdp", "async")),
    Phase("last step", ("pretrain.run.steps:Steps.train_step",), 1, how="last step", is_last=True),
    Phase("close", ("mcore.observe:GlobalState.close",), 1, is_last=True),
    Phase("leave", ("torch.distributed:destroy_process_group",), 1, is_last=True),
)

# A signal to a process of the tree: the rank, its parent, or that of its parent. The kernel lets no
# process of a container stop or kill process 1.
_TREE = {"rank": 0, "launcher": 1, "hatch": 2, "process 1": 1}
SIGNALS = {
    f"{name} to {process}": (name, level)
    for process, level in _TREE.items()
    for name in ("TERM", "HUP", "INT", "KILL", "STOP+CONT")[: 3 if process == "process 1" else 5]
}
CHANGES = "--save-interval 3 --keep-last 3 --check-replicas-interval 5"
KINDS = {
    "kill": "SIGKILL", "stop": "SIGSTOP, never continued",
    "stop and continue": "SIGSTOP, continued during the next start", "exception": "an exception",
    "exit": "`os._exit(7)`", "abort": "SIGABRT", "memory": "MemoryError",
    "slow": "one rank two seconds late", "nan": "the loss of the last step is not finite",
    **dict.fromkeys(SIGNALS, "all ranks save, or end"),
    "INT to hatch": "which ignores it",
    "changed": f"SIGKILL, then a start with `{CHANGES}`",
    "node": "SIGKILL of a node's torchrun and rank, then a restart",
    "full disk": "no space left until the job has ended",
    "full disk for a moment": "no space left, for a dozen steps",
    "tracker away": "MLflow's server killed, back at the next start",
    "tracker restarted": "MLflow's server killed and restarted",
    "flipped bit": "in the newest checkpoint", "truncated file": "in the newest checkpoint",
    "no manifest": "in the newest checkpoint",
}  # fmt: skip
FATAL = ("kill", "stop", "stop and continue", "exception", "exit", "abort", "memory")
DAMAGES = ("flipped bit", "truncated file", "no manifest")
# These do not end the job.
HARMLESS = (
    "slow", "full disk", "full disk for a moment", "tracker away", "tracker restarted",
    *(kind for kind in SIGNALS if kind.startswith("STOP") or kind == "INT to hatch"),
)  # fmt: skip
_KINDS_UNDER = {  # the kinds, and the processes that get signals
    "forked": {*FATAL, "slow", "rank"}, "torchrun": {*FATAL, "slow"},
    "agents": {"node", "kill", "exception"}, "command": {*FATAL, "rank", "launcher"},
    "hatch": {"rank", "launcher", "hatch"}, "container": {"rank", "process 1"},
}  # fmt: skip
_ON_DISKS = ("data", "log", "validation", "save", "save: files", "save: manifest", "close")
_ON_TRACKERS = ("start", "forward", "log", "save", "close")


@dataclass(frozen=True)
class Fault:
    """A fault in a phase of a rank, at its n-th call, or between two starts."""

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
        call = f", call {self.hit}" if self.hit > 1 else ""
        return f"{self.kind} (rank {self.rank}, {self.phase}{call})"


def phase_of(name: str) -> Phase:
    """The row of a phase."""
    return next(phase for phase in PHASES if phase.name == name)


def shuffle_faults(
    seed: int, *, with_disk: bool = True, launcher: str = "forked"
) -> Iterator[Fault]:
    """Every fault in every phase of every rank, in the order of a seed, without end."""
    source = random.Random(f"{seed} {launcher}")
    while True:
        faults = list(all_faults(source, with_disk, launcher))
        source.shuffle(faults)
        yield from faults


def all_faults(source: random.Random, with_disk: bool, launcher: str) -> Iterator[Fault]:
    """Every fault once, at random calls."""

    def on_each_rank(kind: str, phase: Phase, variants: tuple[str, ...]) -> Iterator[Fault]:
        for rank in phase.ranks:
            yield Fault(kind, phase.name, rank, source.randint(1, phase.hits), variants)

    under = _KINDS_UNDER[launcher]
    kinds = [kind for kind in KINDS if kind in under or kind.partition(" to ")[2] in under]
    for phase in PHASES:
        for kind in kinds:
            if phase.name == "leave" and kind.startswith("stop"):
                continue  # the other ranks have left, so nothing in the job could notice
            if phase.is_last and kind in SIGNALS:
                continue  # the job has done its last step and saved, so it only ends
            yield from on_each_rank(kind, phase, phase.variants)
        if phase.name == "last step" and launcher != "torchrun":
            yield from on_each_rank("nan", phase, phase.variants)
        if launcher != "forked":
            continue
        if with_disk and phase.name in _ON_DISKS:
            for kind in ("full disk", "full disk for a moment", "kill"):
                yield from on_each_rank(kind, phase, ("disk",))
        if phase.name in _ON_TRACKERS:
            for kind in ("tracker away", "tracker restarted"):
                yield Fault(kind, phase.name, RANKS - 1, source.randint(1, phase.hits), ("mlflow",))
                yield Fault(
                    source.choice(FATAL), phase.name, source.choice(phase.ranks),
                    source.randint(1, phase.hits), ("mlflow",),
                )  # fmt: skip
    # Damage is done between two starts. torchrun makes starts that we cannot separate.
    for kind in (*DAMAGES, "changed") if launcher in ("forked", "command") else ():
        for phase in (p for p in PHASES if p.name in ("forward", "save", "saved", "validation")):
            yield from on_each_rank(kind, phase, phase.variants)
