"""Memory of the main job's step against plain PyTorch, and of the parts that watch a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.suites.main_job import open_loop, take_step
from layouts.reference import PlainGPT, PlainSteps
from pretrain.corpus import load_corpus
from pretrain.settings import Settings
from rank_testing import run_ranks

# 13 M parameters: with gradients and moments 200 MiB.
MODEL = Settings(
    dp=1, num_layers=4, hidden_size=512, num_attention_heads=8, global_batch_size=8, mlflow=False
)
LAST_STEP = 4
PARTS = """
import pathlib, tempfile, torch, torch.distributed as dist
def read_size():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.ones(8, requires_grad=True).sum().backward()
before = read_size()
from mcore.observe import RunLog, StragglerDetector
from mcore.parallel import ProcessGroups
groups, detector = ProcessGroups.from_sizes(), StragglerDetector()
detector.configure(1, 0, port=0, enabled=True)
with tempfile.TemporaryDirectory() as folder, RunLog(folder, log_every=10) as log:
    for step in range(1, 21):
        with detector:
            loss = torch.ones(()) / step
        log.log_step({"loss": loss}, lr=1e-4)
        if step % 10 == 0:
            detector.report(1e12, 10)
    print("added", read_size() - before, groups.size("dp"))
"""


def read_size(name: str) -> int:
    """A size of this process in bytes, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure_peak(before: int, step: Callable[[int], float]) -> tuple[float, int]:
    """The loss of the last step, and the highest memory of the steps after the first."""
    torch.set_num_threads(1)
    step(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size now
    loss = [step(number) for number in range(2, LAST_STEP + 1)][-1]
    return loss, read_size("VmHWM") - before


def measure_ours() -> tuple[float, int]:
    load_corpus()
    before = read_size("VmRSS")
    with open_loop(MODEL) as loop:
        return measure_peak(before, lambda step: take_step(loop, step))


def measure_plain() -> tuple[float, int]:
    corpus, before = load_corpus(), read_size("VmRSS")
    model = PlainGPT(MODEL)
    plain = PlainSteps(model, fused=True)

    def step(number: int) -> float:
        loss = model.loss(corpus.training_batch(MODEL, slice(None), number))
        plain.update(number, loss)
        return float(loss)

    return measure_peak(before, step)


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are read from /proc")
def test_a_step_needs_at_most_five_percent_more_than_plain_pytorch() -> None:
    (ours,), (plain,) = run_ranks(measure_ours, 1), run_ranks(measure_plain, 1)
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert 200 << 20 < ours[1] <= 1.05 * plain[1]


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are read from /proc")
def test_log_detector_and_groups_add_at_most_25_mb_to_a_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PARTS], env=environment, check=True, capture_output=True, text=True
    )
    _, added, size = done.stdout.split()[-3:]
    assert size == "1"
    assert 1e6 < int(added) <= 25e6
