"""Rows that ranks share unequally: gathered, scattered, reduced and exchanged, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel import (
    ProcessGroups,
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    use_process_groups,
)
from rank_testing import run_ranks

RANKS = 3
SIZES = ([3, 0, 2], [0, 0, 4], [2, 2, 2], [0, 0, 0], [1, 5, 0])


def seeded(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def forward_and_backward(function: Any, values: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Output, its gradient, the input's gradient, and the output's from a gradient of that."""
    leaf = values.clone().requires_grad_()
    output = function(leaf)
    grad = seeded(output.shape[0], seed).requires_grad_()
    [input_grad] = torch.autograd.grad(output, leaf, grad, create_graph=True)
    assert not output.numel() or output.untyped_storage().data_ptr() != leaf.data_ptr()
    [again] = torch.autograd.grad(input_grad, grad, values)
    return tuple(tensor.detach() for tensor in (output, grad, input_grad, again))


def share_sequences() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    for sizes in SIZES:
        total, own = sum(sizes), slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        whole = [seeded(total, 10 + r) for r in range(RANKS)]
        grads = [seeded(total, 20 + r) for r in range(RANKS)]
        parts = [seeded(size, 30 + r) for r, size in enumerate(sizes)]
        part_grads = [seeded(size, 40 + r) for r, size in enumerate(sizes)]
        given = {"group": group, "input_split_sizes": torch.tensor(sizes)}

        output, _, input_grad, again = forward_and_backward(
            lambda x, g=given: scatter_to_sequence_parallel_region(x, **g), whole[0], 40 + rank
        )
        assert torch.equal(output, whole[0][own])
        assert torch.equal(input_grad, torch.cat(part_grads))
        assert torch.equal(again, output)

        output, _, input_grad, again = forward_and_backward(
            lambda x, g=given: reduce_scatter_to_sequence_parallel_region(x, **g),
            whole[rank],
            40 + rank,
        )
        torch.testing.assert_close(output, sum(whole)[own])
        assert torch.equal(input_grad, torch.cat(part_grads))
        torch.testing.assert_close(again, output)

        for is_partial, expected in ((True, sum(grads)[own]), (False, grads[rank][own])):
            output, grad, input_grad, again = forward_and_backward(
                lambda x, p=is_partial, s=sizes: gather_from_sequence_parallel_region(
                    x, p, group, output_split_sizes=s
                ),
                parts[rank],
                20 + rank,
            )
            assert torch.equal(output, torch.cat(parts))
            assert torch.equal(grad, grads[rank])
            torch.testing.assert_close(input_grad, expected)
            assert torch.equal(again, output)


# How many rows each rank sends to each other one.
MATRICES = ([[1, 2, 0], [0, 3, 1], [2, 0, 0]], [[0] * 3] * 3, [[0, 0, 4], [0, 0, 0], [0, 0, 1]])


def exchange_rows() -> None:
    rank = dist.get_rank()
    for matrix in MATRICES:
        sent, received = matrix[rank], [row[rank] for row in matrix]
        inputs = [seeded(sum(row), r) for r, row in enumerate(matrix)]
        chunks = [rows.split(row) for rows, row in zip(inputs, matrix, strict=True)]
        grads = [seeded(sum(row[r] for row in matrix), 50 + r) for r in range(RANKS)]
        grad_chunks = [grad.split([row[r] for row in matrix]) for r, grad in enumerate(grads)]
        for given in ({"output_split_sizes": received}, {}):
            output, _, input_grad, again = forward_and_backward(
                lambda x, s=sent, g=given: all_to_all(x, input_split_sizes=s, **g),
                inputs[rank],
                50 + rank,
            )
            assert torch.equal(output, torch.cat([row[rank] for row in chunks]))
            assert torch.equal(input_grad, torch.cat([row[rank] for row in grad_chunks]))
            assert torch.equal(again, output)
    rows = torch.arange(6).view(3, 2) + 10 * rank
    assert all_to_all(rows.t().contiguous().t()).tolist() == [
        [10 * other + 2 * rank, 10 * other + 2 * rank + 1] for other in range(RANKS)
    ]


def route_tokens() -> None:
    """A mixture of experts over the ranks has the loss and the gradients of one process."""
    rank = dist.get_rank()
    tokens = [seeded(rows, 60 + r) for r, rows in enumerate((5, 0, 7))]
    choices = [torch.arange(len(t)).mul(7).add(r).remainder(RANKS) for r, t in enumerate(tokens)]
    weights = [seeded(2, 70 + r) for r in range(RANKS)]

    whole = [t.clone().requires_grad_() for t in tokens]
    experts = [w.clone().requires_grad_() for w in weights]
    outputs = [
        torch.stack([torch.tanh(row @ experts[c]) for row, c in zip(t, choice, strict=True)])
        if len(t)
        else t
        for t, choice in zip(whole, choices, strict=True)
    ]
    sum((output**3).sum() for output in outputs).backward()

    leaf, expert = tokens[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    order = choices[rank].argsort(stable=True)
    counts = choices[rank].bincount(minlength=RANKS)
    arrived = all_to_all(leaf[order], input_split_sizes=counts)
    received = [int((choice == rank).sum()) for choice in choices]
    back = all_to_all(
        torch.tanh(arrived @ expert), input_split_sizes=received, output_split_sizes=counts
    )
    output = torch.empty_like(back).index_copy(0, order, back)
    (output**3).sum().backward()
    torch.testing.assert_close(output, outputs[rank])
    torch.testing.assert_close(leaf.grad, whole[rank].grad)
    torch.testing.assert_close(expert.grad, experts[rank].grad)


def refuse_bad_sizes() -> None:
    rows = torch.ones(4, 2)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            scatter_to_sequence_parallel_region,
            {"input_split_sizes": [1, 2, 2]},
            "sums to 5.*4 rows",
        ),
        (all_to_all, {"input_split_sizes": [4, 0, 1]}, "sums to 5, an input of shape"),
        (reduce_scatter_to_sequence_parallel_region, {"input_split_sizes": [4]}, "3 numbers"),
        (scatter_to_sequence_parallel_region, {"input_split_sizes": [5, -1, 0]}, "0 or more"),
        (
            gather_from_sequence_parallel_region,
            {"output_split_sizes": [1, 1, 1]},
            rf"1 row for rank {dist.get_rank()} of the group, its input of shape \(4, 2\) has 4",
        ),
        (all_to_all, {}, "equal parts to the 3 ranks"),
        (all_to_all, {"input_split_sizes": [4, 0, 0], "output_split_sizes": [4]}, "3 numbers"),
    ]
    for function, sizes, message in cases:
        with pytest.raises(ValueError, match=message):
            function(rows, **sizes)
    with pytest.raises(ValueError, match="without dims"):
        all_to_all(torch.tensor(1.0), input_split_sizes=[1, 0, 0])
    with pytest.raises(
        TypeError, match=r"got ProcessGroup: the order is all_to_all\(input_, group"
    ):
        all_to_all(dist.group.WORLD, rows)  # type: ignore[arg-type]


def on_three_ranks() -> None:
    with use_process_groups(ProcessGroups(tp=dist.group.WORLD, ep=dist.group.WORLD)):
        for check in (share_sequences, exchange_rows, route_tokens, refuse_bad_sizes):
            check()


def test_on_three_ranks() -> None:
    run_ranks(on_three_ranks, RANKS)


def test_without_a_group_the_input_comes_back() -> None:
    rows = torch.ones(3)
    assert all_to_all(rows, input_split_sizes=[3], output_split_sizes=[3]) is rows
    assert scatter_to_sequence_parallel_region(rows, input_split_sizes=[3]) is rows
    assert gather_from_sequence_parallel_region(rows, output_split_sizes=[3]) is rows
    assert reduce_scatter_to_sequence_parallel_region(rows, input_split_sizes=[3]) is rows
