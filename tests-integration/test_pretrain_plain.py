"""The main job learns as a plain loop does from the same weights and batches, in 200 steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mcore.parallel import ProcessGroups
from pretrain.corpus import load_corpus
from pretrain.model.building import build_model
from pretrain.model.configuration import transformer_config
from pretrain.settings import Settings
from pretrain_runs import losses_of, train_on_ranks

STEPS, WARMUP, PEAK, FINAL = 200, 20, 3e-3, 3e-4
LAYERS, HEADS, HIDDEN, LENGTH, ROWS = 2, 4, 64, 64, 8


def forward(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a GPT with rotary positions, by the weights' names in a checkpoint."""
    half = HIDDEN // HEADS // 2
    angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = w["embedding.weight"][tokens]
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        qkv = linear(f"{name}.attention.qkv", norm(f"{name}.attention_norm", x))
        q, k, v = qkv.view(ROWS, LENGTH, HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        context = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + linear(f"{name}.attention.projection", context.transpose(1, 2).flatten(2))
        wide = F.gelu(linear(f"{name}.feed_forward.widen", norm(f"{name}.feed_forward_norm", x)))
        x = x + linear(f"{name}.feed_forward.narrow", wide)
    return norm("final_norm", x) @ w["embedding.weight"].T


def train_plainly(w: dict[str, torch.Tensor], settings: Settings) -> list[float]:
    text, losses = load_corpus(), []
    matrices = [one for one in w.values() if one.dim() > 1]
    others = [one for one in w.values() if one.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, STEPS + 1):
        batch = text.training_batch(settings, slice(0, ROWS), step)
        logits = forward(w, batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        done = max(0, step - WARMUP) / (STEPS - WARMUP)
        rate = FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = PEAK * step / WARMUP if step <= WARMUP else rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_job_ends_where_a_plain_loop_ends(tmp_path: Path) -> None:
    settings = Settings(
        dp=1, num_layers=LAYERS, num_attention_heads=HEADS, hidden_size=HIDDEN, seq_length=LENGTH,
        global_batch_size=ROWS, train_iters=STEPS, eval_interval=0, eval_batches=1,
        save_interval=0, mlflow=False, tensorboard=False, straggler=False,
    )  # fmt: skip
    groups, cpu = ProcessGroups.from_sizes(), torch.device("cpu")
    model = build_model(settings, transformer_config(settings), groups, cpu)
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()
    }
    plain = train_plainly(weights, settings)
    train_on_ranks(settings, tmp_path)
    ours = losses_of(tmp_path)
    assert ours[:20] == pytest.approx(plain[:20], rel=1e-5)
    assert len(ours) == len(plain) == STEPS
    last, theirs = sum(ours[-20:]) / 20, sum(plain[-20:]) / 20
    assert last == pytest.approx(theirs, rel=2e-3)
    assert last < 0.6 * ours[0]
