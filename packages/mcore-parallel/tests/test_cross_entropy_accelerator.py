"""The cross entropy on the stand-in: numbers of plain PyTorch, few launches, no wait."""

import pytest
import torch

from mcore.parallel import vocab_parallel_cross_entropy
from standin import launches, no_host_waits


def make(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 2, 50, generator=generator).to(dtype).to(device).requires_grad_()
    target = torch.randint(0, 48, (4, 2), generator=generator)
    target[0, 1] = -100
    return logits, target.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_losses_and_gradients_are_those_of_the_cpu(accelerator, dtype, smoothing, ignore_index):
    results = []
    for device in ("cpu", accelerator):
        logits, target = make(device, dtype)
        target[0, 1] = ignore_index
        losses = vocab_parallel_cross_entropy(
            logits, target, smoothing, vocab_size=48, ignore_index=ignore_index
        )
        (losses * torch.arange(8.0, device=device).view(4, 2)).sum().backward()
        results.append((losses.detach().cpu(), logits.grad.cpu()))
    exact = {"rtol": 0, "atol": 0} if accelerator.type == "standin" else {}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **exact)
    assert results[0][0][0, 1] == 0


def test_an_unknown_target_has_the_loss_nan_and_no_gradient(accelerator):
    logits, target = make(accelerator)
    target[1, 0] = 50
    losses = vocab_parallel_cross_entropy(logits, target)
    losses.sum().backward()
    plain = torch.nn.functional.cross_entropy(
        logits.detach().cpu().view(8, 50), target.cpu().view(8).clamp(max=49), reduction="none"
    ).view(4, 2)
    plain[1, 0] = torch.nan
    torch.testing.assert_close(losses.detach().cpu(), plain, equal_nan=True)
    assert logits.grad[1, 0].abs().sum().item() == 0


def test_launches(accelerator):
    logits, target = make(accelerator)
    with no_host_waits(), launches(at_most=14):
        losses = vocab_parallel_cross_entropy(logits, target)
    weights = torch.ones_like(losses)
    with no_host_waits(), launches(at_most=6):
        losses.backward(weights)
