"""Gradients are reduced over the data-parallel ranks while the last backward runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

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


class Chain(torch.nn.Module):
    """Three layers, of which the last is used again at the end, each in a checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(600, 600) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for place in (2, 0, 1, 2):
            layer = self.layers[place]
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant).tanh()
        return hidden.square().mean()


def take_odd_steps(case: str) -> float | str:
    """Two steps over a chain: the worst error of a gradient, or the error that a rank raised."""
    settings = Settings(global_batch_size=2, seq_length=32, straggler=False)
    with open_loop(settings) as loop:
        model = Chain(use_reentrant=case == "reentrant")
        optimizer = MainWeightOptimizer(model, loop.steps.groups, settings)
        if case == "two optimizers":
            MainWeightOptimizer(model, loop.steps.groups, settings)
        try:
            return max(_take_odd_step(model, optimizer, case, step) for step in range(2))
        except RuntimeError as error:
            return str(error)


def _take_odd_step(model: Chain, optimizer: MainWeightOptimizer, case: str, step: int) -> float:
    plain = Chain(use_reentrant=False)
    plain.load_state_dict(model.state_dict())
    inputs = [torch.full((4, 600), 0.1 * (step + 1) + rank) for rank in range(2)]
    torch.autograd.backward(torch.stack([plain(one) for one in inputs]).mean())
    loss = model(inputs[dist.get_rank()].requires_grad_())
    torch.autograd.backward(loss / 2 if case == "two backwards" else loss, retain_graph=True)
    if case == "two backwards":
        torch.autograd.backward(loss / 2)
    if case == "stopped and taken again" and step == 0:
        return 0.0  # as if an error had ended it
    optimizer.accumulate_gradients()
    optimizer.reduce_gradients(loss)
    worst = 0.0
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert param.grad is not None  # an fp32 parameter is its own main weight
        error = (param.grad - expected.grad).abs().max() / expected.grad.abs().max()
        worst = max(worst, float(error))
    optimizer.step(1e-3, optimizer.clip_gradients(1.0))
    return worst


def test_a_layer_used_twice_has_the_gradient_of_plain_pytorch() -> None:
    for worst in run_ranks(take_odd_steps, 2, "", timeout_s=120):
        assert float(worst) < 1e-5


@pytest.mark.parametrize(
    "case", ["reentrant", "two backwards", "stopped and taken again", "two optimizers"]
)
def test_a_gradient_after_its_reduction_is_an_error_on_all_ranks(case: str) -> None:
    for error in run_ranks(take_odd_steps, 2, case, timeout_s=120):
        assert "after its reduction had started: run one backward" in str(error)
