"""The main job's steps against plain PyTorch, and with and without the straggler detector.

- The default model has 4 layers of 128, and a step has 16 sequences of 128 bytes.
- Against plain PyTorch, the placement of memory makes a difference of 2 %, so both sides start six
  times. Only the main job copies between ``[s, b]``, in which sequences are cut over ranks, and the
  layout of attention. It rotates query and key in one autograd function.
  Three runs on two machines measured 0.98, 1.00 and 1.08.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.measure import Row, alternate, paired
from layouts.reference import PlainGPT, PlainSteps
from pretrain.run.loop import Loop
from pretrain.run.training import build_loop
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.straggler import StepRanges, StragglerWatch
from rank_testing import run_ranks

_CPU = torch.device("cpu")
_STEPS, _ROUNDS = 10, 20
_COMPARED_STEPS = 3
_LOSSES_NEAR = 1e-5
_PEER = "the same steps with --no-straggler"


def run() -> Iterable[Row]:
    """Yield the rows. Steps of both kinds alternate in one process group."""
    yield _compare_with_plain(starts=6, rounds=3)
    case = f"step of the default model on 2 ranks, detector on, a report every {_STEPS}"
    losses, on_s, off_s = run_ranks(_time_detector, 2, Settings(), _ROUNDS, timeout_s=600)[0]
    if losses[True] != losses[False]:
        yield Row.disagreement(case, _PEER, f"losses {losses[True]} against {losses[False]}")
        return
    yield Row(
        case, on_s, _PEER, off_s, 0.995, f"the losses of {_COMPARED_STEPS} steps, bit for bit",
        f"mean of the faster half of {_ROUNDS} rounds in alternation",
    )  # fmt: skip


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
        1.05, f"the losses of {len(losses)} steps to {_LOSSES_NEAR:g}",
        f"fastest of {starts} starts with {rounds} rounds of {_STEPS} steps in alternation",
    )  # fmt: skip


def _time_plain(settings: Settings, rounds: int) -> tuple[list[tuple[float, float]], float, float]:
    """The rank: losses of both sides, and seconds of a step of each."""
    with open_loop(settings) as loop:
        loop.observed.timers("interval-time", log_level=0).start()
        model = PlainGPT(settings)
        plain, corpus = PlainSteps(model, fused=True), loop.steps.corpus

        def take_plain_step(step: int) -> torch.Tensor:
            loss = model.loss(corpus.training_batch(settings, slice(None), step))
            plain.update(step, loss)
            return loss.detach()

        first = loop.steps.train_step
        losses = [(float(first(step)[0]), float(take_plain_step(step))) for step in range(1, 6)]
        loop.progress.step = len(losses)

        def ours() -> None:
            for _ in range(_STEPS):
                loop._run_step()

        def peer() -> None:
            last = torch.zeros(())
            for step in range(_STEPS):
                last = take_plain_step(step + 10)
            last.item()

        ours_s, peer_s = paired(ours, peer, number=1, repeats=rounds)
        return losses, ours_s / _STEPS, peer_s / _STEPS


def _time_detector(settings: Settings, rounds: int) -> tuple[dict[bool, list[float]], float, float]:
    """One rank: losses by whether the detector is on, and seconds of a step with and without it."""
    losses: dict[bool, list[float]] = {}
    for is_on in (True, False):
        with open_loop(dataclasses.replace(settings, straggler=is_on)) as loop:
            losses[is_on] = [take_step(loop, step) for step in range(1, 1 + _COMPARED_STEPS)]
    with open_loop(dataclasses.replace(settings, straggler=False)) as loop:

        def time_steps(is_on: bool) -> float:
            loop.watch.close()
            watched = dataclasses.replace(settings, straggler=is_on)
            loop.watch = StragglerWatch(watched, loop.folder, _CPU, loop.flops_per_step)
            detector, waits = loop.watch.detector, loop.watch.waits
            loop.steps.ranges = StepRanges(detector, None, _CPU, waits=waits)
            return _time_steps(loop)

        on_s, off_s = alternate([partial(time_steps, is_on) for is_on in (True, False)], rounds)
    return losses, average_faster_half(on_s), average_faster_half(off_s)


def take_step(loop: Loop, step: int) -> float:
    """Do a step and return its loss."""
    loss, *_ = loop.steps.train_step(step)
    loop.watch.end_step()
    return float(loss)


def _time_steps(loop: Loop) -> float:
    """Seconds of a step, of some steps and a report, as between two console lines."""
    take_step(loop, 1)
    loop.watch.report(1)
    dist.barrier()
    started_s = time.perf_counter()
    for step in range(1, 1 + _STEPS):
        take_step(loop, step)
    loop.watch.report(_STEPS)
    return (time.perf_counter() - started_s) / _STEPS


@contextlib.contextmanager
def open_loop(settings: Settings) -> Iterator[Loop]:
    """The main job's loop on one rank, with a temporary run folder and no output."""
    settings = dataclasses.replace(settings, mlflow=False)
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        loop = build_loop(settings, RunFolder(Path(path)), _CPU, None, False, None, int)
        yield loop
        loop.observed.close()
        loop.watch.close()


def average_faster_half(seconds: list[float]) -> float:
    kept = sorted(seconds)[: math.ceil(len(seconds) / 2)]
    return sum(kept) / len(kept)
