"""The loss over a split vocabulary against plain torch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mcore.parallel import ProcessGroups, use_process_groups, vocab_parallel_cross_entropy
from rank_testing import run_ranks

RANKS, COLUMNS = 3, 4
VOCABULARY = RANKS * COLUMNS


def seeded(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def targets(*shape: int, vocab_size: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    found = torch.randint(vocab_size, shape, generator=generator)
    found.view(-1)[::4] = -100
    return found


def smoothed(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Probability 1 - s for the target and s / (v - 1) for all others, spelled out."""
    size = logits.shape[-1]
    wanted = torch.full_like(logits, smoothing / (size - 1))
    wanted.scatter_(-1, target.clamp(min=0)[..., None], 1 - smoothing)
    return (-(wanted * logits.log_softmax(-1)).sum(-1)).masked_fill(target == -100, 0.0)


def reference(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    if smoothing:
        return smoothed(logits, target, smoothing)
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, target.reshape(-1), reduction="none").view(target.shape)


CASES = [
    (shape, vocab_size, smoothing, scale)
    for shape, scale in (((5, 2), 3.0), ((7,), 400.0), ((), 1.0), ((0, 3), 1.0))
    for vocab_size in (None, VOCABULARY - 1, COLUMNS + 1, COLUMNS)
    for smoothing in (0.0, 0.1)
]


def compare_with_one_process() -> None:
    rank = dist.get_rank()
    own = slice(rank * COLUMNS, (rank + 1) * COLUMNS)
    for shape, vocab_size, smoothing, scale in CASES:
        counted = vocab_size or VOCABULARY
        whole = seeded(*shape, VOCABULARY, scale=scale).requires_grad_()
        target, weights = targets(*shape, vocab_size=counted), seeded(*shape, 1)[..., 0]
        expected = reference(whole[..., :counted], target, smoothing)
        (expected * weights).sum().backward()
        leaf = whole.detach()[..., own].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(leaf, target, smoothing, vocab_size=vocab_size)
        (losses * weights).sum().backward()
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(leaf.grad, whole.grad[..., own])
        assert torch.equal(leaf.detach(), whole.detach()[..., own])


def half_precision() -> None:
    """Half logits lose nothing but the last rounding of the gradient."""
    own = slice(dist.get_rank() * COLUMNS, (dist.get_rank() + 1) * COLUMNS)
    target = targets(6)
    for dtype in (torch.bfloat16, torch.float16):
        whole = seeded(6, VOCABULARY, dtype=dtype)
        exact = whole.double().requires_grad_()
        reference(exact, target, 0.0).sum().backward()
        leaf = whole[..., own].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(leaf, target)
        losses.sum().backward()
        assert (losses.dtype, leaf.grad.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(losses.double(), reference(exact, target, 0.0).detach())
        torch.testing.assert_close(leaf.grad, exact.grad[..., own].to(dtype), rtol=0.01, atol=1e-3)


def refuse_on_every_rank() -> None:
    logits = torch.zeros(2, COLUMNS)
    cases: list[tuple[type[Exception], Tensor, dict[str, Any], str]] = [
        (ValueError, torch.tensor([0, VOCABULARY]), {}, "target 12 is not below .* size, 12"),
        (ValueError, torch.tensor([0, 9]), {"vocab_size": 9}, "target 9 is not below .*, 9"),
        (ValueError, torch.tensor([0, -1]), {}, "target -1 .*only -100 is ignored"),
        (ValueError, torch.tensor([-100, 0]), {"ignore_index": -1}, "only -1 is ignored"),
        (ValueError, torch.tensor([0]), {}, r"shapes \(2, 4\) and \(1,\)"),
        (TypeError, torch.zeros(2), {}, "int64, got torch.float32"),
        (ValueError, torch.zeros(2).long(), {"vocab_size": 13}, "expected 1 to 12"),
        (ValueError, torch.zeros(2).long(), {"vocab_size": 0}, "vocab_size is 0"),
        (ValueError, torch.zeros(2).long(), {"label_smoothing": 1.0}, "label_smoothing is 1.0"),
    ]
    for kind, target, options, message in cases:
        with pytest.raises(kind, match=message):
            vocab_parallel_cross_entropy(logits, target, **options)


def on_three_ranks() -> None:
    with use_process_groups(ProcessGroups(tp=dist.group.WORLD)):
        for check in (compare_with_one_process, half_precision, refuse_on_every_rank):
            check()


def test_on_three_ranks() -> None:
    run_ranks(on_three_ranks, RANKS)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_one_process_against_torch_and_finite_differences(smoothing: float) -> None:
    logits, target = seeded(4, 3, 5).requires_grad_(), targets(4, 3, vocab_size=5)
    losses = vocab_parallel_cross_entropy(logits, target, smoothing)
    torch.testing.assert_close(losses, reference(logits, target, smoothing))
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_cross_entropy(x, target, smoothing), (logits,)
    )
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(losses.sum(), logits, create_graph=True)


def test_an_impossible_target_has_an_infinite_loss_with_smoothing_too() -> None:
    logits, target = seeded(2, 5), torch.tensor([1, 2])
    logits[:, 1] = -torch.inf
    for smoothing in (0.0, 0.2):
        losses = vocab_parallel_cross_entropy(logits, target, smoothing)
        torch.testing.assert_close(losses, reference(logits, target, smoothing))
        assert losses[0] == torch.inf


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_target_outside_is_nan_on_a_gpu() -> None:
    """Checks that a GPU is not waited for, and that the mistake shows in the loss."""
    logits, target = torch.zeros(3, 4, device="cuda"), torch.tensor([0, 4, -100], device="cuda")
    losses = vocab_parallel_cross_entropy(logits, target)
    assert losses.isnan().tolist() == [False, True, False]
