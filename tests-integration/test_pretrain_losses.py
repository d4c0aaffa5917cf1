"""The main job's losses, step by step, against the same model in plain PyTorch on one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel import ProcessGroups
from pretrain.model.gpt import TransformerLayer
from pretrain.model.randomness import seed_streams
from pretrain.run.training import build_model, train, transformer_config
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from rank_testing import run_ranks

PlainLosses = Callable[[Settings], list[float]]
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "train_iters": 8,
    "global_batch_size": 8,
    "warmup_iters": 2,
    "eval_interval": 0,
    "eval_batches": 1,
    "save_interval": 0,
}


def train_here(settings: Settings, run_dir: str) -> None:
    """One rank of the main job, in a process group that exists."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    train(settings, RunFolder(Path(run_dir)), torch.device("cpu"), resume=None)


def logged_losses(run_dir: Path) -> list[float]:
    """Loss of each step from the run's JSONL file."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["lm loss"] for record in records if "lm loss" in record}
    assert sorted(by_step) == list(range(1, len(by_step) + 1))
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.parametrize(
    ("tp", "cp", "dp"),
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 4, 1)],
)
def test_losses_equal_the_plain_model(
    tp: int, cp: int, dp: int, tmp_path: Path, plain_losses: PlainLosses
) -> None:
    settings = Settings(tp=tp, cp=cp, dp=dp, **SMALL)
    run_ranks(train_here, settings.world_size, settings, str(tmp_path / "run"), timeout_s=120)
    losses = logged_losses(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(plain_losses(settings), rel=2e-5)


def test_losses_equal_the_plain_model_untied_with_micro_batches(
    tmp_path: Path, plain_losses: PlainLosses
) -> None:
    settings = Settings(tp=2, cp=1, dp=2, untied=True, micro_batch_size=2, **SMALL)
    run_ranks(train_here, 4, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "outer"),
    [(1, 1, 2, 1), (1, 1, 4, 2), (2, 1, 2, 1), (1, 2, 1, 1)],
    ids=["dp2", "dp4-outer2", "tp2-dp2", "cp2"],
)
def test_fully_sharded_losses_equal_the_plain_model(
    tp: int, cp: int, dp: int, outer: int, tmp_path: Path, plain_losses: PlainLosses
) -> None:
    settings = Settings(
        tp=tp, cp=cp, dp=dp, fsdp=True, hsdp_outer=outer, micro_batch_size=2, **SMALL
    )
    run_ranks(train_here, settings.world_size, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


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
    tp: int, cp: int, dp: int, more: dict[str, Any], tmp_path: Path, plain_losses: PlainLosses
) -> None:
    settings = Settings(tp=tp, cp=cp, dp=dp, sequence_parallel=True, **{**SMALL, **more})
    run_ranks(train_here, settings.world_size, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


def test_sequence_parallel_bf16_stays_near_fp32(tmp_path: Path, plain_losses: PlainLosses) -> None:
    settings = Settings(tp=2, cp=1, dp=1, bf16=True, sequence_parallel=True, **SMALL)
    run_ranks(train_here, 2, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-2)


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
    first, second = run_ranks(dropped_here, 2, settings, timeout_s=60)
    assert (first != second) is sequence_parallel


def test_fully_sharded_bf16_stays_near_fp32(tmp_path: Path, plain_losses: PlainLosses) -> None:
    settings = Settings(tp=1, cp=1, dp=2, fsdp=True, bf16=True, **SMALL)
    run_ranks(train_here, 2, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-2)


def test_a_padded_vocabulary_changes_nothing(tmp_path: Path, plain_losses: PlainLosses) -> None:
    settings = Settings(tp=3, cp=1, dp=1, **{**SMALL, "hidden_size": 48, "num_attention_heads": 6})
    run_ranks(train_here, 3, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


def test_bf16_stays_near_fp32(tmp_path: Path, plain_losses: PlainLosses) -> None:
    settings = Settings(tp=2, cp=1, dp=1, bf16=True, **SMALL)
    run_ranks(train_here, 2, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-2)
