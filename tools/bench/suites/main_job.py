"""The main job's steps against plain PyTorch, and with and without the straggler detector.

- The default model has 4 layers of 128, and a step has 16 sequences of 128 bytes.
- Against plain PyTorch, the placement of memory makes a difference of 2 %, so both sides start six
  times. Only the main job copies between ``[s, b]``, in which sequences are cut over ranks, and the
  layout of attention. It rotates query and key in one autograd function.
- A step of the small model is so short that there is a report every tenth of a second. The aim is
  for the default model, with a report every second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.measure import Row, alternate, paired
from bench.plain_job import PlainJob
from mcore.parallel import ProcessGroups
from pretrain.corpus import load_corpus
from pretrain.model.building import build_model, build_optimizer
from pretrain.model.configuration import transformer_config
from pretrain.model.randomness import seed_streams
from pretrain.run.steps import Steps
from pretrain.run.training import build_loop
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.step_metrics import training_flops
from pretrain.watch.straggler import StepRanges, StragglerWatch
from rank_testing import run_ranks

_STEPS = 10
_COMPARED_STEPS = 3
_LOSSES_NEAR = 1e-5
_SMALL = Settings(num_layers=2, hidden_size=64, seq_length=64, global_batch_size=8)
_PEER = "the same steps with --no-straggler"


def run() -> Iterable[Row]:
    """Yield the rows. Steps of both kinds alternate in one process group."""
    yield _compare_with_plain(starts=6, rounds=3)
    cases = (("the default model", Settings(), 12, 0.99), ("a small model", _SMALL, 100, None))
    for model, settings, rounds, target in cases:
        ranks = settings.world_size
        case = f"step of {model} on {ranks} ranks, detector on, a report every {_STEPS}"
        losses, on_s, off_s = run_ranks(_time_detector, ranks, settings, rounds, timeout_s=600)[0]
        if losses[True] != losses[False]:
            yield Row.disagreement(case, _PEER, f"losses {losses[True]} against {losses[False]}")
            continue
        agreement = f"the losses of {_COMPARED_STEPS} steps, bit for bit"
        note = f"mean of the faster half of {rounds} rounds in alternation"
        yield Row(case, on_s, _PEER, off_s, target, agreement, note)


def _compare_with_plain(starts: int, rounds: int) -> Row:
    settings = Settings(dp=1, mlflow=False, train_iters=100_000)
    case = "step of the default model on 1 rank with log, TensorBoard, JSONL and detector"
    peer = f"plain PyTorch {torch.__version__}: SDPA, fused AdamW, no log"
    measured = [
        run_ranks(_time_plain, 1, settings, rounds, timeout_s=600)[0] for _ in range(starts)
    ]
    losses = [pair for one, _, _ in measured for pair in one]
    if not max(abs(one / other - 1) for one, other in losses) < _LOSSES_NEAR:
        return Row.disagreement(case, peer, f"losses {losses}")
    return Row(
        case, min(ours for _, ours, _ in measured), peer, min(theirs for _, _, theirs in measured),
        1.0, f"the losses of {len(losses)} steps to {_LOSSES_NEAR:g}",
        f"fastest of {starts} starts with {rounds} rounds of {_STEPS} steps in alternation",
    )  # fmt: skip


def _time_plain(settings: Settings, rounds: int) -> tuple[list[tuple[float, float]], float, float]:
    """The rank: losses of both sides, and seconds of a step of each."""
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        loop = build_loop(
            settings, RunFolder(Path(path)), torch.device("cpu"), None, False, None, int
        )
        model = loop.steps.model
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        plain = PlainJob(settings, loop.steps.corpus, weights)
        loop.observed.timers("interval-time", log_level=0).start()
        first = loop.steps.train_step
        losses = [(float(first(step)[0]), float(plain.step(step))) for step in range(1, 6)]
        loop.progress.step = len(losses)

        def ours() -> None:
            for _ in range(_STEPS):
                loop._run_step()

        def peer() -> None:
            last = torch.zeros(())
            for step in range(_STEPS):
                last = plain.step(step + 10)
            last.item()

        ours_s, peer_s = paired(ours, peer, number=1, repeats=rounds)
        return losses, ours_s / _STEPS, peer_s / _STEPS


def _time_detector(settings: Settings, rounds: int) -> tuple[dict[bool, list[float]], float, float]:
    """One rank: losses by whether the detector is on, and seconds of a step with and without it."""
    losses: dict[bool, list[float]] = {}
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        for is_on in (True, False):
            job = _Job(settings, RunFolder(Path(path)), is_on=is_on)
            losses[is_on] = [job.loss_of(step) for step in range(1, 1 + _COMPARED_STEPS)]
            job.watch.close()

        def time_steps(is_on: bool) -> float:
            job.watch_with(is_on)
            seconds = job.seconds_per_step()
            job.watch.close()
            return seconds

        on_s, off_s = alternate([partial(time_steps, is_on) for is_on in (True, False)], rounds)
    return losses, _average_faster_half(on_s), _average_faster_half(off_s)


class _Job:
    """The steps of a run, and its detector."""

    def __init__(self, settings: Settings, folder: RunFolder, *, is_on: bool) -> None:
        self.settings = settings
        self.folder = folder
        self.device = torch.device("cpu")
        self.groups = ProcessGroups.from_sizes(tp=settings.tp, cp=settings.cp)
        seed_streams(settings.seed, self.groups, self.device)
        self.model = build_model(settings, transformer_config(settings), self.groups, self.device)
        self.optimizer = build_optimizer(settings, self.model, self.groups)
        self.corpus = load_corpus()
        self.watch_with(is_on)

    def watch_with(self, is_on: bool) -> None:
        """Make a new detector, on or off."""
        settings = dataclasses.replace(self.settings, straggler=is_on)
        self.watch = StragglerWatch(settings, self.folder, self.device, training_flops(settings))
        ranges = StepRanges(self.watch.detector, None, self.device, waits=self.watch.waits)
        self.steps = Steps(
            settings, self.model, self.optimizer, self.corpus, self.groups, self.device, ranges
        )

    def loss_of(self, step: int) -> float:
        """Do a step and return its loss."""
        loss, *_ = self.steps.train_step(step)
        self.watch.end_step()
        return float(loss)

    def seconds_per_step(self) -> float:
        """Do some steps and a report, as between two console lines."""
        self.loss_of(1)
        self.watch.report(1)
        dist.barrier()
        started_s = time.perf_counter()
        for step in range(1, 1 + _STEPS):
            self.loss_of(step)
        self.watch.report(_STEPS)
        return (time.perf_counter() - started_s) / _STEPS


def _average_faster_half(seconds: list[float]) -> float:
    kept = sorted(seconds)[: math.ceil(len(seconds) / 2)]
    return sum(kept) / len(kept)
