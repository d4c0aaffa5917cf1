"""The main job's losses, step by step, against the same model in plain PyTorch on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layouts.reference import plain_losses
from mcore.parallel import ProcessGroups
from pretrain.model.building import build_model
from pretrain.model.configuration import transformer_config
from pretrain.model.gpt import TransformerLayer
from pretrain.model.norm import LayerNorm
from pretrain.model.randomness import seed_streams
from pretrain.settings import Settings
from pretrain_runs import SMALL as BASE
from pretrain_runs import curve_of, losses_of, train_on_ranks
from pretrain_worlds import train_all
from rank_testing import run_ranks

SMALL: dict[str, Any] = {**BASE, "dp": 1, "train_iters": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2},
    "tp2-cp2": {"tp": 2, "cp": 2},
    "cp2-dp2": {"cp": 2, "dp": 2},
    "tp4": {"tp": 4},
    "cp4": {"cp": 4},
    "untied-micro-batches": {"tp": 2, "dp": 2, "untied": True, "micro_batch_size": 2},
    "padded-vocabulary": {"tp": 3, "hidden_size": 48, "num_attention_heads": 6},
}
FSDP: dict[str, Any] = {"fsdp": True, "micro_batch_size": 2}
SEQUENCE: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
OTHERS: dict[str, dict[str, Any]] = {
    "fsdp-dp2": {"dp": 2, **FSDP},
    "fsdp-dp4-outer2": {"dp": 4, "hsdp_outer": 2, **FSDP},
    "fsdp-tp2-dp2": {"tp": 2, "dp": 2, **FSDP},
    "fsdp-cp2": {"cp": 2, **FSDP},
    "sp-tp2": SEQUENCE,
    "sp-tp4-untied": {**SEQUENCE, "tp": 4, "untied": True},
    "sp-tp2-cp2": {**SEQUENCE, "cp": 2, "micro_batch_size": 2},
    "sp-tp2-dp2-fsdp": {**SEQUENCE, "dp": 2, **FSDP},
    # beyond the table
    "vpp4": {"pp": 2, "vpp": 4, "num_layers": 8, "micro_batch_size": 1},
    "odd-length": {"tp": 2, "seq_length": 33},
    "odd-length-clipped": {**FSDP, "dp": 2, "seq_length": 17, "micro_batch_size": 1,
                           "clip_grad": 0.02},
    "pp2-cp2-clipped": {"cp": 2, "pp": 2, "seq_length": 36, "micro_batch_size": 2,
                        "clip_grad": 0.02},
}  # fmt: skip
IN_BF16: dict[str, dict[str, Any]] = {
    "bf16-tp2": {"tp": 2, "bf16": True},
    "bf16-sp-tp2": {**SEQUENCE, "bf16": True},
    "bf16-fsdp": {"dp": 2, "fsdp": True, "bf16": True},
}
BY_NAME = {
    name: Settings(**{**SMALL, **layout}) for name, layout in (LAYOUTS | OTHERS | IN_BF16).items()
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of all selected tests."""
    selected = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    names = {callspec.params.get("name") for callspec in selected} & BY_NAME.keys()
    folder = tmp_path_factory.mktemp("runs")
    jobs = [(name, settings) for name, settings in BY_NAME.items() if name in names]
    train_all(sorted(jobs, key=lambda job: job[1].world_size), folder)
    return folder


def assert_losses_of_the_plain_model(settings: Settings, run: Path) -> None:
    """The loss of each step, and the settings that clip have clipped."""
    losses = losses_of(run)
    assert losses == pytest.approx(plain_losses(settings), rel=2e-5)
    if settings.clip_grad < 1:
        assert min(curve_of(run, "grad-norm").values()) > settings.clip_grad


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_the_plain_model(name: str, runs: Path) -> None:
    losses = losses_of(runs / name)
    assert losses[-1] < losses[0] - 0.1
    assert_losses_of_the_plain_model(BY_NAME[name], runs / name)


@pytest.mark.parametrize("name", OTHERS)
def test_losses_of_other_layouts_equal_the_plain_model(name: str, runs: Path) -> None:
    assert_losses_of_the_plain_model(BY_NAME[name], runs / name)


@pytest.mark.slow
def test_losses_of_eight_ranks_equal_the_plain_model(tmp_path: Path) -> None:
    layout = {"tp": 2, "pp": 4, "num_layers": 4, "micro_batch_size": 1}
    settings = Settings(**{**SMALL, **layout})
    train_on_ranks(settings, tmp_path)
    assert_losses_of_the_plain_model(settings, tmp_path)


@pytest.mark.parametrize("name", IN_BF16)
def test_bf16_stays_near_fp32(name: str, runs: Path) -> None:
    assert losses_of(runs / name) == pytest.approx(plain_losses(BY_NAME[name]), rel=2e-2)


def dropped_here(settings: Settings) -> list[bool]:
    """Which of 64 elements the residual dropout of a layer keeps, in its first draw."""
    groups = ProcessGroups.from_sizes(tp=settings.tp)
    device = torch.device("cpu")
    seed_streams(settings.seed, groups, device)
    model = build_model(settings, transformer_config(settings), groups, device).train()
    layer = next(m for m in model.modules() if isinstance(m, TransformerLayer))
    return layer._drop(torch.ones(64)).bool().tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_residual_dropout_differs_between_tp_ranks_where_their_parts_do(
    sequence_parallel: bool,
) -> None:
    settings = Settings(tp=2, dp=1, dropout=0.5, sequence_parallel=sequence_parallel)
    first, second = run_ranks(dropped_here, 2, settings, timeout_s=600)
    assert (first != second) is sequence_parallel


def test_no_gradient_of_a_norm_gets_lost_in_bf16() -> None:
    # Sums in bf16 stop to grow once a term is below half of their last bit.
    hidden, gradient = torch.randn(2, 16_384, 16, generator=torch.Generator().manual_seed(1))
    hidden, gradient = hidden.bfloat16(), (gradient + 0.3).bfloat16()
    norm = LayerNorm(16, dtype=torch.bfloat16)
    exact = torch.nn.LayerNorm(16, dtype=torch.float64)
    norm(hidden).backward(gradient)
    exact(hidden.double()).backward(gradient.double())
    for found, wanted in zip(norm.parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=2**-8, atol=0.1)
