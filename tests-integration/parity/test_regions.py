"""Collectives, losses and slices of mcore.parallel against megatron-core's, on two gloo ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcore.parallel as ours
from rank_testing import run_ranks


def peer(module: str) -> Any:
    """A module of megatron-core, imported where a test needs it."""
    return import_module(f"megatron.core.{module}")


def start(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Tell megatron-core about the ranks; it asks for the current CUDA device."""
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    peer("parallel_state").initialize_model_parallel(**sizes, create_gloo_process_groups=False)


def seeded(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + dist.get_rank())
    return torch.randn(shape, generator=generator)


def both(theirs: Any, mine: Any, values: torch.Tensor) -> None:
    """Output and gradient of two functions of one tensor are equal to the last bit."""
    found = []
    for function in (theirs, mine):
        leaf = values.clone().requires_grad_()
        output = function(leaf)
        output.backward(torch.arange(output.numel()).view(output.shape).to(output.dtype))
        found.append((output.detach(), leaf.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def collectives_and_loss() -> None:
    with pytest.MonkeyPatch.context() as patch:
        start(patch, tensor_model_parallel_size=2)
        mappings, tensor_parallel = peer("tensor_parallel.mappings"), peer("tensor_parallel")
        group, rank = dist.group.WORLD, dist.get_rank()
        sizes = [4, 4]
        both(
            lambda x: mappings.reduce_scatter_to_sequence_parallel_region(x, group, sizes),
            lambda x: ours.reduce_scatter_to_sequence_parallel_region(
                x, group, input_split_sizes=sizes
            ),
            seeded(8, 2),
        )
        for is_partial in (False, True):
            both(
                lambda x, p=is_partial: mappings.gather_from_sequence_parallel_region(x, p, group),
                lambda x, p=is_partial: ours.gather_from_sequence_parallel_region(
                    x, p, group, output_split_sizes=sizes
                ),
                seeded(4, 3),
            )
        sent, received = [[1, 3], [2, 0]][rank], [[1, 2], [3, 0]][rank]
        both(
            lambda x: mappings.all_to_all(group, x, received, sent),
            lambda x: ours.all_to_all(x, group, input_split_sizes=sent),
            seeded(sum(sent), 3),
        )
        target = torch.tensor([[0, 9], [5, 3], [4, 7]])
        logits = seeded(3, 2, 5) * 4
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), target)
        mine = ours.vocab_parallel_cross_entropy(logits, target, tp_group=group)
        torch.testing.assert_close(mine, losses)


def test_collectives_and_loss() -> None:
    run_ranks(collectives_and_loss, 2)


def loss_of_one_rank() -> None:
    """Losses agree with smoothing too; on several ranks megatron-core's differ from one's."""
    with pytest.MonkeyPatch.context() as patch:
        start(patch)
        target, logits = torch.tensor([0, 3, 4]), seeded(3, 5) * 4
        for smoothing in (0.0, 0.1):
            losses, grads = [], []
            for function in (
                peer("tensor_parallel").vocab_parallel_cross_entropy,
                ours.vocab_parallel_cross_entropy,
            ):
                leaf = logits.clone().requires_grad_()
                losses.append(function(leaf * 1, target, smoothing))
                losses[-1].sum().backward()
                grads.append(leaf.grad)
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(*grads)


def test_loss_of_one_rank() -> None:
    run_ranks(loss_of_one_rank, 1)


def slices() -> None:
    """Without documents a batch is split over the whole group, whether it is hybrid or not."""
    with pytest.MonkeyPatch.context() as patch:
        start(patch, context_parallel_size=2)
        batch = {
            "tokens": torch.arange(32).view(2, 16),
            "attention_mask": torch.arange(512).view(2, 1, 16, 16),
            "labels": None,
        }
        expected = peer("utils").get_batch_on_this_cp_rank(dict(batch))
        for is_hybrid in (False, True):
            part = ours.get_batch_on_this_cp_rank(batch, dist.group.WORLD, is_hybrid_cp=is_hybrid)
            assert part["labels"] is None
            for name in ("tokens", "attention_mask"):
                assert torch.equal(part[name], expected[name])


def test_slices() -> None:
    run_ranks(slices, 2)
