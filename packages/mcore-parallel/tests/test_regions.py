"""The autograd collectives at the borders of tensor-parallel regions, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel import (
    ProcessGroups,
    all_to_all,
    checkpoint_activations,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    use_process_groups,
    vocab_parallel_cross_entropy,
)
from mcore.parallel.reductions import sum_over_group
from rank_testing import run_ranks


def gather_sequence_of_replicated(input_: Tensor, group: Any = None) -> Tensor:
    return gather_from_sequence_parallel_region(input_, False, group)


def gather_sequence_of_partial(input_: Tensor, group: Any = None) -> Tensor:
    return gather_from_sequence_parallel_region(input_, True, group)


FUNCTIONS = {
    "copy": copy_to_tensor_model_parallel_region,
    "reduce": reduce_from_tensor_model_parallel_region,
    "scatter_last": scatter_to_tensor_model_parallel_region,
    "gather_last": gather_from_tensor_model_parallel_region,
    "scatter_sequence": scatter_to_sequence_parallel_region,
    "gather_sequence_partial": gather_sequence_of_partial,
    "gather_sequence_replicated": gather_sequence_of_replicated,
    "reduce_scatter": reduce_scatter_to_sequence_parallel_region,
}
SHAPE = (6, 2, 12)  # 2 and 3 ranks share the first and the last dim


def reference_forward(name: str, inputs: list[Tensor], rank: int) -> Tensor:
    """The output of one rank, from the inputs of all, without a collective."""
    size = len(inputs)
    if name == "copy":
        return inputs[rank]
    if name == "reduce":
        return sum(inputs[1:], start=inputs[0])
    if name == "scatter_last":
        return inputs[rank].chunk(size, dim=-1)[rank]
    if name == "gather_last":
        return torch.cat(inputs, dim=-1)
    if name == "scatter_sequence":
        return inputs[rank].chunk(size)[rank]
    if name == "reduce_scatter":
        return sum(inputs[1:], start=inputs[0]).chunk(size)[rank]
    return torch.cat(inputs)


BACKWARD_OF = {
    "copy": "reduce",
    "reduce": "copy",
    "scatter_last": "gather_last",
    "gather_last": "scatter_last",
    "scatter_sequence": "gather_sequence_replicated",
    "gather_sequence_partial": "reduce_scatter",
    "gather_sequence_replicated": "scatter_sequence",
    "reduce_scatter": "gather_sequence_partial",
}


def seeded(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(values: Tensor) -> Tensor:
    """The same values with the strides of a transposed tensor that skips elements."""
    room = values.new_zeros(*reversed(values.shape), 2)
    view = room[..., 0].permute(*reversed(range(values.dim())))
    view.copy_(values)
    return view


def forward_and_backward(
    dtype: torch.dtype, with_strides: bool
) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(input, output, output grad, input grad) of every function on this rank."""
    rank, layout = dist.get_rank(), strided if with_strides else torch.clone
    results = {}
    for number, (name, function) in enumerate(FUNCTIONS.items()):
        values = seeded(SHAPE, 10 * number + rank, dtype)
        leaf = layout(values).requires_grad_()
        output = function(leaf, dist.group.WORLD)
        grad = seeded(tuple(output.shape), 1000 + 10 * number + rank, dtype)
        output.backward(layout(grad))
        assert torch.equal(leaf.detach(), values), f"{name} changed its input"
        results[name] = (values, output.detach(), grad, leaf.grad)
    return results


@pytest.mark.parametrize(
    ("size", "dtype", "with_strides"),
    [
        (3, torch.float64, False),
        (3, torch.float64, True),
        (2, torch.float16, False),
        (2, torch.bfloat16, True),
    ],
)
def test_each_function_runs_its_collective_forward_and_the_paired_one_backward(
    size: int, dtype: torch.dtype, with_strides: bool
) -> None:
    per_rank = run_ranks(forward_and_backward, size, dtype, with_strides)
    for name in FUNCTIONS:
        inputs = [results[name][0] for results in per_rank]
        output_grads = [results[name][2] for results in per_rank]
        for rank, results in enumerate(per_rank):
            _, output, _, input_grad = results[name]
            assert output.dtype == input_grad.dtype == dtype
            expected = reference_forward(name, inputs, rank)
            torch.testing.assert_close(output, expected, msg=lambda m, n=name: f"{n}: {m}")
            expected_grad = reference_forward(BACKWARD_OF[name], output_grads, rank)
            torch.testing.assert_close(
                input_grad, expected_grad, msg=lambda m, n=name: f"{n} backward: {m}"
            )


def output_shares_memory() -> dict[str, bool]:
    shared = {}
    for name, function in FUNCTIONS.items():
        input_ = torch.ones(SHAPE)
        output = function(input_, dist.group.WORLD)
        shared[name] = output.untyped_storage().data_ptr() == input_.untyped_storage().data_ptr()
    return shared


def test_only_copy_returns_memory_of_its_input() -> None:
    for shared in run_ranks(output_shares_memory, 2):
        assert shared == {name: name == "copy" for name in FUNCTIONS}


def in_place_change_of_a_copied_leaf() -> str:
    weight = torch.ones(2, requires_grad=True)
    copied = copy_to_tensor_model_parallel_region(weight, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="modified inplace"):
        copied.mul_(2)
    return "refused"


def test_changing_the_alias_made_by_copy_is_refused_by_autograd() -> None:
    assert run_ranks(in_place_change_of_a_copied_leaf, 2) == ["refused"] * 2


# Gradients against finite differences. Each function below takes a tensor that all ranks hold
# alike and returns one that all ranks hold alike. All ranks run gradcheck at the same time on the
# same values, so they perturb the same element and ask for the same backward pass in lockstep, and
# the finite difference is the derivative of what the ranks compute together.


def rank_weight(rows: int, columns: int) -> Tensor:
    return seeded((rows, columns), 77 + dist.get_rank())


def column_then_row(input_: Tensor) -> Tensor:
    hidden = copy_to_tensor_model_parallel_region(input_) @ rank_weight(4, 3)
    return reduce_from_tensor_model_parallel_region(torch.tanh(hidden) @ rank_weight(3, 2))


def sharded_features(input_: Tensor) -> Tensor:
    shard = scatter_to_tensor_model_parallel_region(input_)
    return gather_from_tensor_model_parallel_region(torch.sin(shard * rank_weight(4, 2)))


def sharded_sequence(input_: Tensor) -> Tensor:
    shard = scatter_to_sequence_parallel_region(input_)
    return gather_sequence_of_replicated(torch.sin(shard * rank_weight(2, 4)))


def sequence_parallel_block(input_: Tensor) -> Tensor:
    shard = torch.sin(scatter_to_sequence_parallel_region(input_))
    whole = gather_sequence_of_partial(shard)
    partial = torch.tanh(whole @ rank_weight(4, 3)) @ rank_weight(3, 2)
    return gather_sequence_of_replicated(reduce_scatter_to_sequence_parallel_region(partial))


def used_twice(input_: Tensor) -> Tensor:
    first = copy_to_tensor_model_parallel_region(input_) @ rank_weight(4, 2)
    second = torch.sin(copy_to_tensor_model_parallel_region(input_)) @ rank_weight(4, 2)
    total = reduce_from_tensor_model_parallel_region(first)
    return total * reduce_from_tensor_model_parallel_region(first * second)


LOCKSTEP_FUNCTIONS = (
    column_then_row,
    sharded_features,
    sharded_sequence,
    sequence_parallel_block,
    used_twice,
)


def check_derivatives(order: int) -> list[str]:
    checked = []
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    with use_process_groups(ProcessGroups(tp=dist.group.WORLD)):
        for function in LOCKSTEP_FUNCTIONS:
            input_ = seeded((4, 4), 5).requires_grad_()
            more = (
                {} if order == 1 else {"grad_outputs": (seeded((4, 4), 6)[:, : width(function)],)}
            )
            if order == 2:
                more["grad_outputs"][0].requires_grad_()
            assert check(function, (input_,), **more)
            checked.append(function.__name__)
    return checked


def width(function: Any) -> int:
    return 4 if function in (sharded_features, sharded_sequence) else 2


@pytest.mark.parametrize("order", [1, 2])
def test_gradients_equal_finite_differences_over_two_ranks(order: int) -> None:
    names = [function.__name__ for function in LOCKSTEP_FUNCTIONS]
    assert run_ranks(check_derivatives, 2, order) == [names] * 2


# A two-layer MLP with its first weight split by columns and its second by rows.

TOKENS, HIDDEN, INNER, TENSOR_PARALLEL = 8, 6, 10, 2


def mlp_parameters() -> dict[str, Tensor]:
    shapes = {"up": (HIDDEN, INNER), "up_bias": (INNER,), "down": (INNER, HIDDEN)}
    shapes |= {"down_bias": (HIDDEN,), "input": (TOKENS, 3, HIDDEN)}
    return {name: seeded(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def unsharded_mlp() -> tuple[Tensor, dict[str, Tensor]]:
    p = {name: value.requires_grad_() for name, value in mlp_parameters().items()}
    output = torch.relu(p["input"] @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
    (output * seeded(tuple(output.shape), 99)).sum().backward()
    return output.detach(), {name: value.grad for name, value in p.items()}


def shard(name: str, value: Tensor, rank: int, sequence_parallel: bool) -> Tensor:
    dims = {"up": 1, "up_bias": 0, "down": 0} | ({"input": 0} if sequence_parallel else {})
    return value.chunk(TENSOR_PARALLEL, dims[name])[rank] if name in dims else value


def sharded_mlp(sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    p = {
        name: shard(name, value, rank, sequence_parallel).clone().requires_grad_()
        for name, value in mlp_parameters().items()
    }
    enter = gather_sequence_of_partial if sequence_parallel else FUNCTIONS["copy"]
    leave = FUNCTIONS["reduce_scatter" if sequence_parallel else "reduce"]
    inner = torch.relu(enter(p["input"], group) @ p["up"] + p["up_bias"])
    output = leave(inner @ p["down"], group) + p["down_bias"]
    loss_weight = seeded((TOKENS, 3, HIDDEN), 99)
    if sequence_parallel:
        loss_weight = loss_weight.chunk(TENSOR_PARALLEL)[rank]
    (output * loss_weight).sum().backward()
    if sequence_parallel:  # a replicated parameter that saw only this rank's part of the sequence
        dist.all_reduce(p["down_bias"].grad)
    return output.detach(), {name: value.grad for name, value in p.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_mlp_equals_the_unsharded_one(sequence_parallel: bool) -> None:
    expected_output, expected_grads = unsharded_mlp()
    for rank, (output, grads) in enumerate(run_ranks(sharded_mlp, 2, sequence_parallel)):
        torch.testing.assert_close(output, shard("input", expected_output, rank, sequence_parallel))
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            expected = shard(name, expected_grads[name], rank, sequence_parallel)
            torch.testing.assert_close(grad, expected, msg=lambda m, n=name: f"{n}: {m}")


def refusals() -> dict[str, str]:
    """The errors of each function for shapes that cannot be shared and for a foreign group."""
    messages = {}
    cases = {name: torch.ones(5, 5) for name in ("scatter_last", "scatter_sequence")}
    cases["reduce_scatter"] = torch.ones(5, 5)
    cases |= {
        f"{name}/0-d": torch.tensor(1.0) for name in FUNCTIONS if name not in ("copy", "reduce")
    }
    for case, input_ in cases.items():
        with pytest.raises(ValueError) as caught:
            FUNCTIONS[case.removesuffix("/0-d")](input_, dist.group.WORLD)
        messages[case] = str(caught.value)
    group = dist.new_group([0])
    for name, function in FUNCTIONS.items():
        if dist.get_rank() == 0:
            input_ = torch.ones(5, 5)
            assert function(input_, group) is input_
            continue
        with pytest.raises(ValueError) as caught:
            function(torch.ones(5, 5), group)
        messages[f"{name}/non-member"] = str(caught.value)
    return messages


def test_bad_shapes_raise_alike_on_all_ranks_and_foreign_groups_on_non_members() -> None:
    first, second = run_ranks(refusals, 2)
    foreign = {case: second.pop(case) for case in list(second) if case.endswith("/non-member")}
    assert first == second
    assert "(5, 5)" in first["scatter_last"]
    assert "dim 1" in first["scatter_last"]
    assert "dim 0" in first["reduce_scatter"]
    assert all("2 ranks" in first[name] for name in ("scatter_sequence", "reduce_scatter"))
    assert len(foreign) == len(FUNCTIONS)
    assert all("not a member" in message for message in foreign.values())


def group_sources() -> dict[str, Tensor]:
    ones = torch.ones(2)
    results = {"no default": reduce_from_tensor_model_parallel_region(ones)}
    with use_process_groups(ProcessGroups()):
        results["default without tp"] = reduce_from_tensor_model_parallel_region(ones)
    with use_process_groups(ProcessGroups(tp=dist.group.WORLD)):
        results["default tp"] = reduce_from_tensor_model_parallel_region(ones)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        mine = alone[dist.get_rank()]
        results["argument"] = reduce_from_tensor_model_parallel_region(ones, mine)
    mesh = dist.init_device_mesh("cpu", (2,))
    results["mesh"] = reduce_from_tensor_model_parallel_region(ones, mesh)
    return results


def test_the_group_is_the_argument_else_the_default_tp_else_none() -> None:
    for results in run_ranks(group_sources, 2):
        sums = {source: value.tolist() for source, value in results.items()}
        alone, both = [1.0, 1.0], [2.0, 2.0]
        assert sums == {
            "no default": alone,
            "default without tp": alone,
            "default tp": both,
            "argument": alone,
            "mesh": both,
        }


def without_gradients() -> list[Any]:
    seen: list[Any] = []
    for function in FUNCTIONS.values():
        leaf = torch.ones(SHAPE, requires_grad=True)
        with torch.no_grad():
            output = function(leaf, dist.group.WORLD)
        token_ids = function(torch.ones(SHAPE, dtype=torch.int64), dist.group.WORLD)
        with torch.inference_mode():
            inferred = function(torch.ones(SHAPE), dist.group.WORLD)
        assert torch.equal(inferred, output)
        seen.append((output.requires_grad, output.grad_fn, token_ids.dtype))
    return seen


def test_without_gradients_nothing_is_recorded() -> None:
    for seen in run_ranks(without_gradients, 2):
        assert seen == [(False, None, torch.int64)] * len(FUNCTIONS)


EMPTY_SHAPES = ((0, 2, 4), (4, 0, 4), (4, 2, 0))


def shapes_of_empty_tensors() -> list[tuple[torch.Size, torch.Size]]:
    shapes = []
    for shape in EMPTY_SHAPES:
        for function in FUNCTIONS.values():
            leaf = torch.ones(shape, requires_grad=True)
            output = function(leaf, dist.group.WORLD)
            output.sum().backward()
            assert leaf.grad is not None
            shapes.append((output.shape, leaf.grad.shape))
    return shapes


def test_tensors_without_elements_keep_their_shapes() -> None:
    expected = []
    for shape in EMPTY_SHAPES:
        inputs = [torch.ones(shape)] * 2
        outputs = [reference_forward(name, inputs, 0).shape for name in FUNCTIONS]
        expected += [(output, torch.Size(shape)) for output in outputs]
    assert run_ranks(shapes_of_empty_tensors, 2) == [expected] * 2


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_without_torch_distributed_the_input_comes_back(name: str) -> None:
    input_ = torch.ones(3, 5, requires_grad=True)
    assert FUNCTIONS[name](input_) is input_


def cuda_values() -> list[bool]:
    device = torch.device("cuda", dist.get_rank())
    equal = []
    for number, (name, function) in enumerate(FUNCTIONS.items()):
        inputs = [seeded(SHAPE, 10 * number + r, torch.bfloat16) for r in range(2)]
        own = inputs[dist.get_rank()].to(device)
        output = function(own, dist.group.WORLD).cpu()
        equal.append(torch.equal(output, reference_forward(name, inputs, dist.get_rank())))
    return equal


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_ranks_compute_the_same_as_the_reference() -> None:
    """Checks on two GPUs that the collectives accept NCCL groups and bfloat16 CUDA tensors."""
    assert run_ranks(cuda_values, 2, init="cuda") == [[True] * len(FUNCTIONS)] * 2


def regions_with_other_tensors() -> list[str]:
    """Every collective with a rank whose tensor, dtype or function is another."""
    rank, world = dist.get_rank(), dist.group.WORLD
    long, other = torch.ones(4 + rank, 2), torch.ones(4, 2, dtype=[torch.float, torch.half][rank])
    tall = torch.ones(4, 2, requires_grad=True)
    gathered = gather_from_sequence_parallel_region(tall, group=world)
    calls: list[Callable[[], object]] = [
        lambda: reduce_from_tensor_model_parallel_region(long, world),
        lambda: gather_from_tensor_model_parallel_region(other, world),
        lambda: gather_from_sequence_parallel_region(long, group=world),
        lambda: reduce_scatter_to_sequence_parallel_region(long, world),
        lambda: (
            reduce_from_tensor_model_parallel_region(long, world)
            if rank
            else gather_from_sequence_parallel_region(long, group=world)
        ),
        lambda: sum_over_group([long.flatten()], world),
        lambda: gather_from_sequence_parallel_region(
            long, group=world, output_split_sizes=[4, 6 - rank]
        ),
        lambda: gather_from_sequence_parallel_region(long, group=world, output_split_sizes=[4, 6]),
        lambda: scatter_to_sequence_parallel_region(long, world, input_split_sizes=[2, 2]),
        lambda: all_to_all(long[1:], world),
        lambda: all_to_all(other, world),
        lambda: all_to_all(
            tall, world, input_split_sizes=[1, 3], output_split_sizes=[[1, 1], [2, 3]][rank]
        ),
        lambda: vocab_parallel_cross_entropy(tall, torch.tensor([0, 1, 2, rank]), 0.0, world),
        lambda: vocab_parallel_cross_entropy(tall, torch.tensor([0, 1, 2, 3 + rank]), 0.0, world),
        lambda: checkpoint_activations(torch.exp, True, long, tp_group=world),
        lambda: gathered.sum().backward(),
    ]
    return [outcome_of(call) for call in calls]


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "done"


def test_the_debug_switch_finds_ranks_that_disagree() -> None:
    first, second = run_ranks(regions_with_other_tensors, 2, env={"MCORE_DEBUG_COLLECTIVES": "1"})
    for here, there in zip(first, second, strict=True):
        assert (here == "done") == (there == "done")
    assert [text == "done" for text in second] == [*[False] * 15, True]
    assert "has all-reduce of torch.float32 (5, 2) on cpu. The first rank has" in second[0]
    assert "all-reduce of torch.float32 (4, 2) on cpu. Call with the same" in second[0]
    assert "has all-gather of torch.float16 (4, 2)" in second[1]
    assert "has reduce-scatter of torch.float32 (4, 2) on cpu. Other ranks have" in first[3]
    assert "has all-gather of" in first[4]
    assert "has sum of torch.float32 (10,)" in second[5]
    assert "has the sizes (4, 5). The first rank has the sizes (4, 6)" in second[6]
    assert "rank 1 of the process group failed: output_split_sizes [4, 6] has" in first[7]
    assert "rank 1 of the process group failed: input_split_sizes [2, 2] sums to 4" in first[8]
    assert "rank 0 of the process group failed: an input of shape (3, 2) cannot" in second[9]
    assert "has all-to-all of rows (2,) of torch.float16 on cpu" in second[10]
    assert "rank 1 of the process group failed: output_split_sizes is [2, 3]" in first[11]
    assert "has cross entropy of torch.float32 (4, 2), (0.0, 4, -100), targets " in second[12]
    assert "rank 1 of the process group failed: target 4 is not below" in first[13]
    assert "has distributed activations of torch.float32 (5, 2)" in second[14]


@pytest.mark.parametrize("group", [None, object(), "tp"])
def test_a_group_in_the_place_of_the_flag_is_refused(group: Any) -> None:
    with pytest.raises(TypeError, match=r"as tensor_parallel_output_grad: .*group=\.\.\."):
        gather_from_sequence_parallel_region(torch.zeros(2, 2), group)
    for flag in (True, False, 0, 1):
        gathered = gather_from_sequence_parallel_region(torch.zeros(2, 2), flag)  # type: ignore[arg-type]
        assert gathered.shape == (2, 2)
