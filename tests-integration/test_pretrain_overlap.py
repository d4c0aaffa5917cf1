"""Gradients are reduced over the data-parallel ranks while the last backward runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.suites.main_job import open_loop
from pretrain.optim.main_weights import MainWeightOptimizer
from pretrain.settings import Settings
from rank_testing import run_ranks


def take_gradients(layout: dict[str, Any]) -> tuple[list[int], int, float]:
    """One step of a rank, without the update.

    Returns the reductions that each backward had started before the gradient of the model's first
    parameter, the parts of the bucket, and the worst error of the reduced gradients against the
    mean of the ranks' own.
    """
    settings = Settings(
        num_layers=6, global_batch_size=8, seq_length=32, straggler=False, **layout
    )  # fmt: skip
    with open_loop(settings) as loop:
        optimizer, groups = loop.steps.optimizer, loop.steps.groups
        assert isinstance(optimizer, MainWeightOptimizer)
        own = [torch.zeros_like(param) for param in optimizer.params]
        first, started = next(loop.steps.model.parameters()), list[int]()

        def add(place: int, gradient: torch.Tensor) -> None:
            own[place] += gradient
            if optimizer.params[place] is first:
                started.append(len(optimizer._reductions))

        for place, param in enumerate(optimizer.params):
            hook: Any = param.register_hook
            hook(partial(add, place))
        optimizer.reduce_gradients(loop.steps._forward_and_backward(1))
        worst = 0.0
        for expected, main in zip(own, optimizer.main, strict=True):
            dist.all_reduce(expected, group=groups.dp_cp)
            expected /= settings.num_microbatches * groups.size("dp_cp")
            assert main.grad is not None
            worst = max(worst, float((main.grad - expected).abs().max() / expected.abs().max()))
        return started, len(optimizer._parts), worst


@pytest.mark.parametrize(
    ("layout", "backwards"),
    [({"dp": 2}, 1), ({"dp": 2, "micro_batch_size": 2}, 2), ({"dp": 1, "cp": 2}, 1)],
    ids=["dp2", "dp2-accumulated", "cp2"],
)
def test_parts_are_reduced_before_the_last_backward_ends(
    layout: dict[str, Any], backwards: int
) -> None:
    for started, parts, worst in run_ranks(take_gradients, 2, layout, timeout_s=120):
        assert parts >= 3
        # The last part has the first parameter, so it starts after this count.
        assert started == [0] * (backwards - 1) + [parts - 1]
        assert worst < 1e-5
