"""Memory: a step of the main job against plain PyTorch, and the parts that watch a process.

- A step's peak is the growth of a process from before the model exists to the highest point of
  its later steps. The model has 13 M parameters in fp32, so weights, gradients and moments take
  200 MiB.
- The parts are ``RunLog``, the straggler detector and ``ProcessGroups``, with their imports, in a
  new process that has imported torch and joined gloo. It logs 20 steps and makes two reports.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

import torch

from bench.measure import Row
from bench.suites.main_job import open_loop, take_step
from layouts.reference import PlainGPT, PlainSteps
from pretrain.corpus import load_corpus
from pretrain.settings import Settings
from rank_testing import run_ranks
from scale.meter import forget_peak, read_memory

_MODEL = Settings(
    dp=1, num_layers=4, hidden_size=512, num_attention_heads=8, global_batch_size=8, mlflow=False
)
_STEPS, _ROUNDS = 4, 3
_LIMIT_MIB = 25e6 / 2**20
_PARTS = """
import sys, tempfile, torch, torch.distributed as dist
sys.path[:] = {path!r}
from scale.meter import read_memory
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.ones(8, requires_grad=True).sum().backward()
before = read_memory("VmRSS")
from mcore.observe import RunLog, StragglerDetector
from mcore.parallel import ProcessGroups
groups, detector = ProcessGroups.from_sizes(), StragglerDetector()
detector.configure(1, 0, port=0, enabled=True)
with tempfile.TemporaryDirectory() as folder, RunLog(folder, log_every=10) as log:
    for step in range(1, 21):
        with detector:
            loss = torch.ones(()) / step
        log.log_step({{"loss": loss}}, lr=1e-4)
        if step % 10 == 0:
            detector.report(1e12, 10)
    print(read_memory("VmRSS") - before, "bytes", groups.size("dp"))
"""


def run() -> Iterable[Row]:
    """Yield the rows."""
    case, peer = "peak of a step of 13 M parameters on 1 rank", "plain PyTorch, fused AdamW"
    sides = (_measure_ours, _measure_plain)
    measured = [[run_ranks(side, 1)[0] for side in sides] for _ in range(_ROUNDS)]
    losses = [found[0] for found in measured[0]]
    if abs(losses[0] / losses[1] - 1) > 1e-5:
        yield Row.disagreement(case, peer, f"losses {losses}")
    else:
        ours, theirs = (min(found[side][1] for found in measured) for side in (0, 1))
        agreement = f"the loss of step {_STEPS}"
        yield Row(case, ours, peer, theirs, 1 / 1.05, agreement, unit="MiB")
    code = _PARTS.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    added_mib = int(done.stdout.split()[-3]) / 2**20
    case = "RunLog, straggler detector and ProcessGroups, beyond torch"
    yield Row(case, added_mib, "limit of 25 MB", _LIMIT_MIB, 1.0, unit="MiB")


def _measure_ours() -> tuple[float, float]:
    before = read_memory("VmRSS")
    with open_loop(_MODEL) as loop:
        return _measure_peak(before, lambda step: take_step(loop, step))


def _measure_plain() -> tuple[float, float]:
    corpus, before = load_corpus(), read_memory("VmRSS")
    model = PlainGPT(_MODEL)
    plain = PlainSteps(model, fused=True)

    def take_plain_step(step: int) -> float:
        loss = model.loss(corpus.training_batch(_MODEL, slice(None), step))
        plain.update(step, loss)
        return float(loss)

    return _measure_peak(before, take_plain_step)


def _measure_peak(before: int, step: Callable[[int], float]) -> tuple[float, float]:
    """The loss of the last step, and the highest memory of the steps after the first, in MiB."""
    torch.set_num_threads(1)
    step(1)
    forget_peak()
    loss = [step(number) for number in range(2, 1 + _STEPS)][-1]
    return loss, (read_memory("VmHWM") - before) / 2**20
