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
from rank_testing import run_ranks

SMALL: dict[str, Any] = {**BASE, "train_iters": 5}


@pytest.mark.parametrize(
    ("tp", "cp", "dp"),
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 4, 1)],
)
def test_losses_equal_the_plain_model(tp: int, cp: int, dp: int, tmp_path: Path) -> None:
    settings = Settings(tp=tp, cp=cp, dp=dp, **SMALL)
    train_on_ranks(settings, tmp_path)
    losses = losses_of(tmp_path)
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(plain_losses(settings), rel=2e-5)


def test_losses_equal_the_plain_model_untied_with_micro_batches(tmp_path: Path) -> None:
    settings = Settings(tp=2, cp=1, dp=2, untied=True, micro_batch_size=2, **SMALL)
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-5)


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "outer"),
    [(1, 1, 2, 1), (1, 1, 4, 2), (2, 1, 2, 1), (1, 2, 1, 1)],
    ids=["dp2", "dp4-outer2", "tp2-dp2", "cp2"],
)
def test_fully_sharded_losses_equal_the_plain_model(
    tp: int, cp: int, dp: int, outer: int, tmp_path: Path
) -> None:
    settings = Settings(
        tp=tp, cp=cp, dp=dp, fsdp=True, hsdp_outer=outer, micro_batch_size=2, **SMALL
    )
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-5)


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "more"),
    [
        (2, 1, 1, {}),
        (4, 1, 1, {"untied": True}),
        (2, 2, 1, {"micro_batch_size": 2}),
        (2, 1, 2, {"micro_batch_size": 2, "fsdp": True}),
    ],
    ids=["tp2", "tp4-untied", "tp2-cp2", "tp2-dp2-fsdp"],
)
def test_sequence_parallel_losses_equal_the_plain_model(
    tp: int, cp: int, dp: int, more: dict[str, Any], tmp_path: Path
) -> None:
    settings = Settings(tp=tp, cp=cp, dp=dp, sequence_parallel=True, **{**SMALL, **more})
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-5)


def test_sequence_parallel_bf16_stays_near_fp32(tmp_path: Path) -> None:
    settings = Settings(tp=2, cp=1, dp=1, bf16=True, sequence_parallel=True, **SMALL)
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-2)


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


def test_fully_sharded_bf16_stays_near_fp32(tmp_path: Path) -> None:
    settings = Settings(tp=1, cp=1, dp=2, fsdp=True, bf16=True, **SMALL)
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-2)


@pytest.mark.parametrize(
    "held_out",
    [
        {"dp": 1, "pp": 2, "vpp": 4, "num_layers": 8, "micro_batch_size": 1},
        {"dp": 1, "tp": 2, "seq_length": 33},
        {"dp": 2, "fsdp": True, "seq_length": 17, "micro_batch_size": 1, "clip_grad": 0.02},
        {"dp": 1, "cp": 2, "pp": 2, "seq_length": 36, "micro_batch_size": 2, "clip_grad": 0.02},
        pytest.param(
            {"dp": 1, "tp": 2, "pp": 4, "num_layers": 4, "micro_batch_size": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["vpp4", "odd-length", "odd-length-clipped", "pp2-cp2-clipped", "pp4-tp2"],
)
def test_layouts_beyond_the_table_equal_the_plain_model(
    held_out: dict[str, Any], tmp_path: Path
) -> None:
    settings = Settings(**{**SMALL, **held_out})
    train_on_ranks(settings, tmp_path)
    if settings.clip_grad < 1:
        assert min(curve_of(tmp_path, "grad-norm").values()) > settings.clip_grad
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-5)


def test_a_padded_vocabulary_changes_nothing(tmp_path: Path) -> None:
    settings = Settings(tp=3, cp=1, dp=1, **{**SMALL, "hidden_size": 48, "num_attention_heads": 6})
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-5)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    settings = Settings(tp=2, cp=1, dp=1, bf16=True, **SMALL)
    train_on_ranks(settings, tmp_path)
    assert losses_of(tmp_path) == pytest.approx(plain_losses(settings), rel=2e-2)


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
