"""Two data-parallel ranks of the main job against torch's two wrappers around the same model.

- Both sides read the same rows, clip and step with fused AdamW, and end a step with its mean loss.
- The main job reduces gradients in up to eight parts while the last backward runs, and averages
  the loss with the last one. The peer of ``--fsdp`` shards each layer and then the rest, as the
  main job does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.measure import Row, alternate
from bench.suites.main_job import average_faster_half, open_loop, take_step
from layouts.reference import PlainGPT, PlainSteps
from pretrain.settings import Settings
from rank_testing import run_ranks

_ROUNDS, _STEPS, _COMPARED_STEPS = 15, 10, 5


def run() -> Iterable[Row]:
    """Yield the rows."""
    for peer, options in (("DistributedDataParallel", ""), ("fully_shard", " with --fsdp")):
        settings = Settings(fsdp=bool(options), straggler=False)
        case = f"step of the default model on 2 ranks{options}"
        losses, ours_s, peer_s = run_ranks(_time_both, 2, settings, timeout_s=600)[0]
        worst = max(abs(ours / theirs - 1) for ours, theirs in losses)
        if not worst < 1e-5:
            yield Row.disagreement(case, peer, f"losses {losses}")
            continue
        yield Row(
            case, ours_s, f"torch's {peer}, fused AdamW", peer_s, 1.0, f"losses to {worst:.0e}",
            f"mean of the faster half of {_ROUNDS} rounds in alternation",
        )  # fmt: skip


class _Layer(PlainGPT):
    """One layer of a plain model, with the parameters that it takes from it."""

    def __init__(self, model: PlainGPT, name: str) -> None:
        torch.nn.Module.__init__(self)
        self.name, self.heads = name, model.heads
        names = [key for key in model.weights if key.startswith(f"{name}/")]
        self.weights = torch.nn.ParameterDict({key: model.weights.pop(key) for key in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, s, h]`` to the same."""
        return self._block(self.name, x)


class _Layered(PlainGPT):
    """The plain model as a module of layers. Returns its loss, for wrappers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        count = range(settings.num_layers)
        self.layers = torch.nn.ModuleList(_Layer(self, f"layers/{number}") for number in count)

    def _block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers[int(name.partition("/")[2])](x)
        return output

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, or the logits of tokens for it."""
        return self.loss(batch) if isinstance(batch, dict) else super().forward(batch)


def _time_both(settings: Settings) -> tuple[list[tuple[float, float]], float, float]:
    """One rank: the losses of both sides, and seconds of a step of each."""
    with open_loop(settings) as loop:
        model, corpus = _Layered(settings), loop.steps.corpus
        rows = loop.steps._select_rows(0, loop.steps.rows_per_rank)
        wrapped: torch.nn.Module = model
        if settings.fsdp:
            for part in (*model.layers, model):
                fully_shard(part)
        else:
            wrapped = DistributedDataParallel(model)
        plain = PlainSteps(model, fused=True)

        def take_plain_step(step: int) -> float:
            loss = wrapped(corpus.training_batch(settings, rows, step))
            plain.update(step, loss)
            mean = loss.detach() / settings.dp
            dist.all_reduce(mean)
            return float(mean)

        sides = (partial(take_step, loop), take_plain_step)
        losses = [(sides[0](step), sides[1](step)) for step in range(1, 1 + _COMPARED_STEPS)]

        def time_steps(side: Any) -> float:
            dist.barrier()
            started_s = time.perf_counter()
            for step in range(1, 1 + _STEPS):
                side(step)
            return (time.perf_counter() - started_s) / _STEPS

        ours_s, peer_s = alternate([partial(time_steps, side) for side in sides], _ROUNDS)
    return losses, average_faster_half(ours_s), average_faster_half(peer_s)
