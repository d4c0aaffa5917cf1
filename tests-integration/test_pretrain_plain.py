"""The main job against a plain loop that shares no code with it or with the table of layouts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from layouts.cell import Result, Task, do_tasks
from mcore.parallel import ProcessGroups
from pretrain.corpus import load_corpus
from pretrain.model.building import build_model
from pretrain.model.configuration import transformer_config
from pretrain.settings import Settings
from pretrain_runs import losses_of, train_on_ranks
from rank_testing import run_ranks

# An fp32 number is rounded by up to 2**-24 = 6e-8, and the sums of a step have some thousand terms
# whose errors add up like a random walk: sqrt(10_000) * 6e-8 = 6e-6.
ROUNDING = 1e-5
Weights = dict[str, torch.Tensor]


def norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def attention(w: Weights, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    rows, length, hidden = x.shape
    half = hidden // heads // 2
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    qkv = linear(w, f"{name}.qkv", x).view(rows, length, heads, -1).transpose(1, 2)
    q, k, v = qkv.chunk(3, dim=-1)
    context = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return linear(w, f"{name}.projection", context.transpose(1, 2).flatten(2))


def experts(
    w: Weights, name: str, x: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the likeliest experts, and the losses of the router."""
    logits = F.linear(x, w[f"{name}.router.weight"])
    best, chosen = logits.topk(settings.topk + 1)
    # Rounding in fp32 moves a logit by 1e-7, so it decides for no token.
    assert (best[..., -2] - best[..., -1]).min() > 1e-5
    chances, chosen = logits.softmax(-1), chosen[..., :-1]
    gates = chances.gather(-1, chosen)
    gates = gates / gates.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for number in range(settings.experts):
        widen, narrow = (w[f"{name}.experts.own.{number}.{part}"] for part in ("widen", "narrow"))
        gate = torch.where(chosen == number, gates, 0.0).sum(-1, keepdim=True)
        out = out + gate * F.linear(F.gelu(F.linear(x, widen)), narrow)
    shares = F.one_hot(chosen, settings.experts).to(x).mean((1, 2))
    balance = settings.experts * (shares * chances.mean(1)).sum(-1).mean()
    size = logits.logsumexp(-1).square().mean()
    return out, settings.balance_loss * balance + settings.z_loss * size


def loss_of(w: Weights, batch: Weights, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of a GPT by its weights' names in a checkpoint, and those of its routers."""
    x, routing = w["embedding.weight"][batch["tokens"]], torch.zeros(())
    for layer in range(settings.num_layers):
        name = f"layers.{layer}"
        normed = norm(w, f"{name}.attention_norm", x)
        x = x + attention(w, f"{name}.attention", normed, settings.num_attention_heads)
        normed, name = norm(w, f"{name}.feed_forward_norm", x), f"{name}.feed_forward"
        if settings.experts:
            out, of_router = experts(w, name, normed, settings)
            routing = routing + of_router
        else:
            out = linear(w, f"{name}.narrow", F.gelu(linear(w, f"{name}.widen", normed)))
        x = x + out
    logits = norm(w, "final_norm", x) @ w["embedding.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), routing


def train_plainly(settings: Settings, steps: int, dtype: torch.dtype) -> Result:
    """Train from the job's weights on its batches: losses, norms, and the first gradients."""
    one = dataclasses.replace(
        settings, tp=1, cp=1, pp=1, vpp=1, dp=1, ep=1, fsdp=False, sequence_parallel=False
    )
    groups, cpu = ProcessGroups.from_sizes(), torch.device("cpu")
    model = build_model(one, transformer_config(one), groups, cpu)
    w = {
        name: value.detach().to(dtype, copy=True).requires_grad_()
        for name, value in model.named_parameters()
    }
    matrices = [one for one in w.values() if one.dim() > 1]
    others = [one for one in w.values() if one.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    text, result = load_corpus(), Result(1)
    for step in range(1, steps + 1):
        batch = text.training_batch(settings, slice(0, settings.global_batch_size), step)
        loss, routing = loss_of(w, batch, settings)
        (loss + routing).backward()
        if step == 1:
            result.gradients = {name: float(one.grad.norm()) for name, one in w.items()}
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(w.values(), settings.clip_grad)))
        first, last = settings.warmup_iters, settings.train_iters
        done = (step - first) / (last - first)
        rate = 3e-4 + (3e-3 - 3e-4) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * step / first if step <= first else rate
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss.item())
    return result


OFF: dict[str, Any] = {
    "eval_interval": 0, "save_interval": 0, "mlflow": False, "tensorboard": False,
    "straggler": False,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "seq_length": 32, "global_batch_size": 8,
    "warmup_iters": 2, "train_iters": 100, **OFF,
}  # fmt: skip
LAYOUTS = (
    {"dp": 1, "tp": 2, "sequence_parallel": True, "clip_grad": 0.02},
    {"dp": 1, "cp": 2},
    {"dp": 2, "fsdp": True, "seq_length": 17, "micro_batch_size": 2},
    {"dp": 1, "pp": 2, "vpp": 2, "num_layers": 4, "micro_batch_size": 1},
    {"dp": 2, "ep": 2, "experts": 6, "topk": 3, "balance": "sequence", "num_layers": 1},
)


@pytest.mark.slow
def test_layouts_equal_the_plain_loop_in_float64(tmp_path: Path) -> None:
    tasks = [
        Task(
            Settings(**{**SMALL, **layout}),
            str(tmp_path / name),
            False,
            str(tmp_path / f"{name}.json"),
            steps=6,
        )
        for name, layout in zip("abcde", LAYOUTS, strict=True)
    ]
    run_ranks(do_tasks, 2, tasks, 90, timeout_s=600)
    for task in tasks:
        found = Result(**json.loads(Path(task.result).read_text()))
        assert len(found.losses) == 6
        # Later steps of experts have nearer ties, where rounding decides.
        steps = 1 if task.settings.experts else len(found.losses)
        expected = train_plainly(task.settings, steps, torch.float64)
        assert found.losses[:steps] == pytest.approx(expected.losses, rel=ROUNDING)
        assert found.norms[:steps] == pytest.approx(expected.norms, rel=ROUNDING)
        assert found.gradients == pytest.approx(expected.gradients, rel=ROUNDING)
        assert task.settings.clip_grad == 1 or min(found.norms) > task.settings.clip_grad


def test_the_job_of_the_default_size_learns_as_the_plain_loop_does(tmp_path: Path) -> None:
    settings = Settings(dp=1, warmup_iters=3, train_iters=10, eval_batches=1, **OFF)
    train_on_ranks(settings, tmp_path)
    ours = losses_of(tmp_path)
    theirs = train_plainly(settings, settings.train_iters, torch.float32)
    assert ours == pytest.approx(theirs.losses, rel=1e-4)
    assert ours[-1] < 0.8 * ours[0]
