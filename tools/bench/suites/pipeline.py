"""Pipelines of the main job: the idle part of a step against the formula, and against torch.

- A step is the fastest of six. Its idle part is the step minus its passes, averaged over the ranks.
- Tests of the main job compare the losses of these steps with those of one process.
- Passes that sleep (100 ms and 200 ms a stage) need no core and show only the order and the
  messages. The aim is to be at most 15 % over the formula.
- torch's schedule also keeps a buffer for each micro-batch to receive into, in both directions.
  Here there are two at most.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.measure import Row, alternate
from bench.suites.main_job import open_loop
from mcore.parallel import ProcessGroups
from pretrain.run.pipeline import Pipeline
from pretrain.settings import Settings
from rank_testing import run_ranks

_ROUNDS = 6
_NAP_S = 0.1
_CPU = torch.device("cpu")
_MODEL = Settings(
    pp=2, dp=1, num_layers=4, hidden_size=256, seq_length=256, num_attention_heads=4,
    micro_batch_size=2,
)  # fmt: skip


def run() -> Iterable[Row]:
    """Yield the rows."""
    for ranks, chunks, batches in ((2, 1, 2), (2, 1, 8), (2, 2, 4), (4, 1, 8)):
        step_s, busy_s = run_ranks(_time_naps, ranks, chunks, batches, timeout_s=300)[0]
        yield _make_idle_row(ranks, chunks, batches, step_s, busy_s)
    yield _compare_with_torch(dataclasses.replace(_MODEL, global_batch_size=16))


def _make_idle_row(ranks: int, chunks: int, batches: int, step_s: float, busy_s: float) -> Row:
    """The ranks' idle time in a step, against the formula for the same step."""
    share = (ranks - 1) / (chunks * batches + ranks - 1)
    found = 1 - busy_s / step_s
    return Row(
        f"idle time of a step of {ranks} stages{' of two parts' if chunks > 1 else ''}, "
        f"{batches} micro-batches: passes that sleep",
        step_s - busy_s,
        f"(p - 1) / (v m + p - 1) = {share:.3f} of it",
        step_s * share,
        1 / 1.15,
        note=f"idle share {found:.3f}, {100 * (found / share - 1):+.0f} % of the formula's",
    )


class _Naps:
    """Passes that sleep."""

    def __init__(self, pipeline: Pipeline, message: torch.Tensor, busy: _Busy) -> None:
        self.pipeline, self.message, self.busy = pipeline, message, busy

    def forward(self, chunk: int, batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """One nap per stage, divided over its chunks."""
        with self.busy.forward():
            time.sleep(_NAP_S / self.pipeline.chunks)
        output = torch.zeros(self.message.shape) if hidden is None else hidden * 1.0
        return output.sum() if self.pipeline.is_last(chunk) else output.requires_grad_()

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Two naps."""
        with self.busy.backward():
            time.sleep(2 * _NAP_S / self.pipeline.chunks)
        torch.autograd.backward(output, gradient)


def _time_naps(chunks: int, batches: int) -> tuple[float, float]:
    """One rank: seconds of the fastest step, and the mean seconds of the ranks' passes in it."""
    groups = ProcessGroups.from_sizes(pp=dist.get_world_size())
    pipeline = Pipeline(groups, chunks=chunks, device=_CPU, timeout_s=60)
    message = torch.empty(64, 2, 64, device="meta")
    busy = _Busy()
    naps = _Naps(pipeline, message, busy)
    return _find_fastest(lambda: pipeline.train(naps, batches, message), busy)


class _Busy:
    """The time of the passes in a step."""

    seconds = 0.0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A pass."""
        started_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started_s

    data = backward = optimizer = forward


@contextmanager
def _open_steps(settings: Settings) -> Iterator[Any]:
    """The main job's steps on one of its stages, with the time of their passes."""
    torch.set_num_threads(1)
    with open_loop(dataclasses.replace(settings, straggler=False)) as loop:
        steps: Any = loop.steps
        steps.ranges = _Busy()
        yield steps


def _find_fastest(step: Callable[[], object], busy: _Busy) -> tuple[float, float]:
    rounds = []
    for _ in range(_ROUNDS):
        busy.seconds = 0.0
        step_s = _time_step(step)
        mean = torch.tensor(busy.seconds / dist.get_world_size(), dtype=torch.float64)
        dist.all_reduce(mean)
        rounds.append((step_s, float(mean)))
    return min(rounds)


def _time_step(call: Callable[[], object]) -> float:
    """Seconds from the common start to the end of the last rank."""
    dist.barrier()
    started_s = time.perf_counter()
    call()
    dist.barrier()
    elapsed_s = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
    dist.all_reduce(elapsed_s, op=dist.ReduceOp.MAX)
    return float(elapsed_s)


class _Torch:
    """The same stage, micro-batches and loss under torch's 1F1B schedule."""

    def __init__(self, steps: Any) -> None:
        self.steps, self.model, settings = steps, steps.model, steps.settings
        count, rank = settings.num_microbatches, steps.pipeline.rank
        self.batches = [steps._read_training_batch(1, number) for number in range(count)]
        self.numbers = torch.arange(count)
        self.is_first, self.is_last = rank == 0, rank == settings.pp - 1
        hidden = torch.empty(
            settings.seq_length, settings.rows_per_forward, settings.hidden_size, device="meta"
        )
        logits = torch.empty(*hidden.shape[:2], settings.vocabulary_size, device="meta")
        stage = PipelineStage(
            _Numbered(self), rank, settings.pp, _CPU, group=steps.groups.pp,
            input_args=self.numbers[:1] if self.is_first else hidden.requires_grad_(),
            output_args=logits if self.is_last else hidden.requires_grad_(),
        )  # fmt: skip
        self.schedule = Schedule1F1B(stage, count, loss_fn=self._compute_loss, scale_grads=False)

    def _compute_loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.steps._average_loss(output, self.batches[int(number)])
        return loss

    def passes(self) -> torch.Tensor:
        """All passes of the first step. Gradients stay on the parameters."""
        for param in self.model.parameters():
            param.grad = None
        losses: list[torch.Tensor] = []
        target = self.numbers if self.is_last else None
        given = (self.numbers,) if self.is_first else ()
        self.schedule.step(
            *given, number=self.numbers, target=target, losses=losses, return_outputs=False
        )
        return torch.stack([torch.zeros(()), *(loss.detach() for loss in losses)]).sum()


class _Numbered(torch.nn.Module):
    """A stage that is called with the number of a micro-batch instead of the batch."""

    def __init__(self, job: _Torch) -> None:
        super().__init__()
        self.job, self.model = job, job.model

    def forward(self, given: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """Hidden states or logits."""
        batch = self.job.batches[int(number)]
        hidden = None if self.job.is_first else given
        output: torch.Tensor = self.model(batch["tokens"], batch["position_ids"], hidden)
        return output


def _compare_with_torch(settings: Settings) -> Row:
    case = f"passes of a step of 2 stages, {settings.num_microbatches} micro-batches"
    peer = f"torch {torch.__version__.partition('+')[0]} Schedule1F1B"
    losses, ours_s, peer_s = run_ranks(_time_both, 2, settings, timeout_s=600)[-1]
    if abs(losses[0] - losses[1]) > 1e-5 * losses[1]:
        return Row.disagreement(case, peer, f"losses {losses[0]} and {losses[1]}")
    return Row(
        case, ours_s, peer, peer_s, 0.95, "sum of the losses to 1e-5",
        f"the fastest of {_ROUNDS} in alternation",
    )  # fmt: skip


def _time_both(settings: Settings) -> tuple[list[float], float, float]:
    with _open_steps(settings) as steps:
        both = (partial(steps._forward_and_backward, 1), _Torch(steps).passes)
        losses = [float(each()) for each in both]
        ours_s, peer_s = alternate([partial(_time_step, each) for each in both], _ROUNDS)
    return losses, min(ours_s), min(peer_s)
