"""The main job's work of one rank on the stand-in accelerator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.observe import StragglerDetector
from mcore.parallel import ProcessGroups
from pretrain.corpus import load_corpus
from pretrain.model.building import build_model, build_optimizer
from pretrain.model.configuration import transformer_config
from pretrain.model.norm import LayerNorm
from pretrain.model.randomness import seed_streams
from pretrain.optim.adamw import AdamW, TrainingOptimizer
from pretrain.rank import _choose_device
from pretrain.run.steps import Steps
from pretrain.settings import Settings
from pretrain.usage import UsageError
from pretrain.watch.straggler import StepRanges
from standin import no_host_waits
from standin.plugin import KIND, accelerator_fixture  # noqa: F401


def make_weights(device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for shape in ((3, 4), (4,))
    ]


def take_steps(device: torch.device, norms: list[float]) -> tuple[list[torch.Tensor], int]:
    weights = make_weights(device)
    adamw = AdamW(weights, Settings())
    known = [torch.tensor(norm, device=device) for norm in norms]
    with no_host_waits():
        for norm in known:
            for weight in weights:
                weight.grad = torch.ones_like(weight) * norm
            adamw.step(1e-2, norm)
            assert all(weight.grad is None for weight in weights)
    moments = [tensor for weight in weights for _, tensor in adamw.moments(weight)]
    return [tensor.detach().cpu() for tensor in (*weights, *moments)], adamw.updates


def test_an_optimizer_step_on_a_device_is_that_of_the_cpu(accelerator: torch.device) -> None:
    ours, updates = take_steps(accelerator, [1.0, 2.0, 3.0])
    theirs, _ = take_steps(torch.device("cpu"), [1.0, 2.0, 3.0])
    assert updates == 3
    exact = {"rtol": 0, "atol": 0} if accelerator.type == "standin" else {}
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **exact)


@pytest.mark.parametrize("kind", ["cpu", "accelerator"])
@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_step_without_a_finite_norm_changes_nothing(
    accelerator: torch.device, kind: str, norm: float
) -> None:
    device = accelerator if kind == "accelerator" else torch.device("cpu")
    skipped, updates = take_steps(device, [1.0, norm, 3.0])
    expected, _ = take_steps(device, [1.0, 3.0])
    assert updates == 2
    for one, other in zip(skipped, expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank, whose collectives leave tensors as they are."""
    dist.init_process_group(f"cpu:gloo,{KIND}:fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    StragglerDetector.reset_singleton()
    dist.destroy_process_group()


def make_steps(device: torch.device, **options: Any) -> Steps:
    settings = Settings(
        train_iters=3, num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=32,
        global_batch_size=4, micro_batch_size=2, dp=1, **options,
    )  # fmt: skip
    groups = ProcessGroups.from_sizes()
    seed_streams(settings.seed, groups, device)
    model = build_model(settings, transformer_config(settings), groups, device)
    optimizer: TrainingOptimizer = build_optimizer(settings, model, groups)
    corpus = load_corpus(document_multiple=settings.document_multiple if settings.packed else 0)
    ranges = StepRanges(StragglerDetector(), None, device, in_step=True, waits=None)
    return Steps(settings, model, optimizer, corpus, groups, device, ranges)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"packed": True}], ids=str)
def test_no_step_waits_and_the_next_batches_are_on_their_way(
    accelerator: torch.device,
    alone: None,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only a CPU normalises bfloat16 in fp32, and only the norm of gradients is summed differently.
    monkeypatch.setattr(LayerNorm, "forward", torch.nn.LayerNorm.forward)
    steps = make_steps(accelerator, clip_grad=0.0, **options)
    on_cpu = make_steps(torch.device("cpu"), clip_grad=0.0, **options)
    for step in (1, 2, 3):
        with no_host_waits():
            loss, norm, _, skipped = steps.train_step(step)
        assert set(steps._ahead) == {(step + 1, 0), (step + 1, 1)}
        expected, expected_norm, _, _ = on_cpu.train_step(step)
        assert not skipped
        if accelerator.type == "standin":
            assert loss.item() == expected.item()
        rel = 1e-2 if "bf16" in options else 1e-6 if accelerator.type == "standin" else 1e-4
        assert loss.item() == pytest.approx(expected.item(), rel=rel)
        assert norm.item() == pytest.approx(expected_norm.item(), rel=rel)


def test_a_device_for_each_process_is_the_first_that_it_sees(
    accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _choose_device() == torch.device(accelerator.type, 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="rank 3 is number 2 on its machine, which has 2"):
        _choose_device()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert _choose_device() == accelerator
