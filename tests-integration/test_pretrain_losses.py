"""The main job's losses, step by step, against the same model in plain PyTorch on one process."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pretrain.corpus import draw_batch, load_corpus
from pretrain.parameter_init import ParameterInit
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.training import train
from rank_testing import run_ranks

STEPS = 8
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "train_iters": STEPS,
    "global_batch_size": 8,
    "warmup_iters": 2,
    "eval_interval": 0,
    "eval_batches": 1,
    "save_interval": 0,
}


class PlainGPT(torch.nn.Module):
    """Written without any parallel part: whole matrices, plain attention, complex rotations."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.heads = settings.num_attention_heads
        self.num_layers = settings.num_layers
        hidden, std = settings.hidden_size, 0.02
        drawn = ParameterInit(settings.seed, torch.device("cpu"), None)
        self.weights = torch.nn.ParameterDict()

        def normal(name: str, *shape: int, scale: float = 1.0) -> None:
            values = drawn.whole(name, shape, lambda t: torch.nn.init.normal_(t, 0.0, std * scale))
            self.weights[name.replace(".", "/")] = torch.nn.Parameter(values)

        def constant(name: str, size: int, value: float) -> None:
            self.weights[name.replace(".", "/")] = torch.nn.Parameter(torch.full((size,), value))

        normal("embedding.weight", 256, hidden)
        if settings.untied:
            normal("head.weight", 256, hidden)
        last = 1.0 / math.sqrt(2.0 * settings.num_layers)
        for layer in range(settings.num_layers):
            name = f"layers.{layer}"
            normal(f"{name}.attention.qkv.weight", 3 * hidden, hidden)
            normal(f"{name}.attention.projection.weight", hidden, hidden, scale=last)
            normal(f"{name}.feed_forward.widen.weight", 4 * hidden, hidden)
            normal(f"{name}.feed_forward.narrow.weight", hidden, 4 * hidden, scale=last)
            constant(f"{name}.attention.qkv.bias", 3 * hidden, 0.0)
            constant(f"{name}.attention.projection.bias", hidden, 0.0)
            constant(f"{name}.feed_forward.widen.bias", 4 * hidden, 0.0)
            constant(f"{name}.feed_forward.narrow.bias", hidden, 0.0)
            for norm in ("norm1", "norm2"):
                constant(f"{name}.{norm}.weight", hidden, 1.0)
                constant(f"{name}.{norm}.bias", hidden, 0.0)
        constant("final.weight", hidden, 1.0)
        constant("final.bias", hidden, 0.0)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}/weight"].T + self.weights[f"{name}/bias"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return scaled * self.weights[f"{name}/weight"] + self.weights[f"{name}/bias"]

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        size = hidden // self.heads
        qkv = self._linear(f"{name}/qkv", x).view(batch, length, self.heads, 3, size)
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        turn = torch.arange(size // 2) * (-math.log(10_000.0) / (size // 2))
        angles = torch.arange(length)[:, None] * turn.exp()
        turns = torch.polar(torch.ones_like(angles), angles)

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            pairs = torch.complex(heads[..., : size // 2], heads[..., size // 2 :]) * turns
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        scores = rotate(query) @ rotate(key).transpose(-1, -2) / math.sqrt(size)
        future = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        context = (weights @ value).transpose(1, 2).reshape(batch, length, hidden)
        return self._linear(f"{name}/projection", context)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.weights["embedding/weight"][tokens]
        for layer in range(self.num_layers):
            name = f"layers/{layer}"
            x = x + self._attention(f"{name}/attention", self._norm(f"{name}/norm1", x))
            wide = F.gelu(
                self._linear(f"{name}/feed_forward/widen", self._norm(f"{name}/norm2", x))
            )
            x = x + self._linear(f"{name}/feed_forward/narrow", wide)
        head = "head/weight" if "head/weight" in self.weights else "embedding/weight"
        return self._norm("final", x) @ self.weights[head].T


def plain_losses(settings: Settings) -> list[float]:
    """Train the plain model and return the loss of each step."""
    torch.manual_seed(0)
    text = load_corpus().train
    model = PlainGPT(settings)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(1, STEPS + 1):
        batch = draw_batch(
            text,
            rows=slice(None),
            batch_size=settings.global_batch_size,
            seq_length=settings.seq_length,
            seed=settings.seed,
            step=step,
        )
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step <= settings.warmup_iters:
            rate = settings.lr * step / settings.warmup_iters
        else:
            done = (step - settings.warmup_iters) / (settings.train_iters - settings.warmup_iters)
            rate = settings.min_lr
            rate += (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses


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
def test_losses_equal_the_plain_model(tp: int, cp: int, dp: int, tmp_path: Path) -> None:
    settings = Settings(tp=tp, cp=cp, dp=dp, **SMALL)
    run_ranks(train_here, settings.world_size, settings, str(tmp_path / "run"), timeout_s=120)
    losses = logged_losses(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(plain_losses(settings), rel=2e-5)


def test_losses_equal_the_plain_model_untied_with_micro_batches(tmp_path: Path) -> None:
    settings = Settings(tp=2, cp=1, dp=2, untied=True, micro_batch_size=2, **SMALL)
    run_ranks(train_here, 4, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


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
    run_ranks(train_here, settings.world_size, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


def test_fully_sharded_bf16_stays_near_fp32(tmp_path: Path) -> None:
    settings = Settings(tp=1, cp=1, dp=2, fsdp=True, bf16=True, **SMALL)
    run_ranks(train_here, 2, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-2)


def test_a_padded_vocabulary_changes_nothing(tmp_path: Path) -> None:
    settings = Settings(tp=3, cp=1, dp=1, **{**SMALL, "hidden_size": 48, "num_attention_heads": 6})
    run_ranks(train_here, 3, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-5)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    settings = Settings(tp=2, cp=1, dp=1, bf16=True, **SMALL)
    run_ranks(train_here, 2, settings, str(tmp_path / "run"), timeout_s=120)
    assert logged_losses(tmp_path / "run") == pytest.approx(plain_losses(settings), rel=2e-2)
