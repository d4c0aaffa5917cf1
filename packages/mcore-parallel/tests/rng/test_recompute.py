"""Activations computed a second time: the bits of a run that keeps them, and its streams after."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mcore.parallel import (
    CudaRNGStatesTracker,
    ProcessGroups,
    checkpoint_activations,
    checkpoint_context_fn,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    replay_rng_streams,
    use_process_groups,
)
from mcore.parallel.rng import convert_cuda_rng_state, shared
from rank_testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_tracker_yet")

STREAMS = ("model-parallel-rng", "expert-parallel-rng")
WIDTH = 6
Function = Callable[[Tensor], Tensor]


def plain(function: Function, hidden: Tensor) -> Tensor:
    return function(hidden)


def with_context_fn(function: Function, hidden: Tensor) -> Tensor:
    return checkpoint(function, hidden, use_reentrant=False, context_fn=checkpoint_context_fn)


def reentrant(function: Function, hidden: Tensor) -> Tensor:
    return checkpoint(replay_rng_streams(function), hidden, use_reentrant=True)


def ours(function: Function, hidden: Tensor) -> Tensor:
    return checkpoint_activations(function, False, hidden)


KINDS = {f.__name__: f for f in (with_context_fn, reentrant, ours)}

# Programs: matrix products and dropouts, in and out of forks and checkpoints, in any nesting.

Program = list[tuple[str, Any]]
PROGRAMS = st.recursive(
    st.lists(st.tuples(st.sampled_from(["dropout", "linear"]), st.none()), min_size=1, max_size=3),
    lambda inner: st.lists(
        st.one_of(
            st.tuples(st.sampled_from([*STREAMS, *KINDS]), inner),
            st.tuples(st.just("dropout"), st.none()),
        ),
        min_size=1,
        max_size=3,
    ),
    max_leaves=12,
)


def run_program(
    program: Program, hidden: Tensor, weights: Iterator[Tensor], keeps_all: bool
) -> Tensor:
    for kind, inner in program:
        if kind == "dropout":
            hidden = F.dropout(hidden, 0.3)
        elif kind == "linear":
            hidden = torch.tanh(hidden @ next(weights))
        elif kind in STREAMS:
            with get_cuda_rng_tracker().fork(kind):
                hidden = run_program(inner, hidden, weights, keeps_all)
        else:
            own = [next(weights) for _ in range(count_linears(inner))]
            wrap = plain if keeps_all else KINDS[kind]
            hidden = wrap(lambda h, i=inner, o=own: run_program(i, h, iter(o), keeps_all), hidden)
    return hidden


def count_linears(program: Program) -> int:
    return sum(1 if kind == "linear" else count_linears(inner or []) for kind, inner in program)


def outcome(
    forward: Callable[[Tensor, list[Tensor]], Tensor], num_weights: int, graph_safe: bool = False
) -> list[Tensor]:
    """Output, gradients, and the state of every stream after two micro-batches in flight."""
    model_parallel_cuda_manual_seed(
        5, use_cudagraphable_rng=graph_safe, force_reset_rng=True, device="cpu"
    )
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(num_weights)]
    inputs = [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]
    leaves = [tensor.requires_grad_() for tensor in (*inputs, *weights)]
    outputs = [forward(hidden, weights) for hidden in inputs]
    after_forward = every_state()
    for output in outputs:
        output.square().sum().backward()
    grads = [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [*(o.detach() for o in outputs), *grads, *after_forward, *every_state()]


def every_state() -> list[Tensor]:
    states = get_cuda_rng_tracker().get_states(clone=True).values()
    return [torch.get_rng_state(), *(convert_cuda_rng_state(state) for state in states)]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), place


@settings(deadline=None, max_examples=60)
@given(program=PROGRAMS, graph_safe=st.booleans(), autocast=st.booleans())
def test_any_nesting_of_checkpoints_and_forks_gives_the_bits_of_no_checkpoint(
    program: Program, graph_safe: bool, autocast: bool
) -> None:
    def forward(keeps_all: bool, hidden: Tensor, weights: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return run_program(program, hidden, iter(weights), keeps_all)

    kept, again = (
        outcome(functools.partial(forward, keeps_all), count_linears(program), graph_safe)
        for keeps_all in (True, False)
    )
    assert_same_bits(again, kept)


def dropped(hidden: Tensor) -> Tensor:
    hidden = torch.tanh(F.dropout(hidden, 0.3))
    with get_cuda_rng_tracker().fork():
        hidden = torch.tanh(F.dropout(hidden, 0.3))
        with get_cuda_rng_tracker().fork(STREAMS[1]):
            return torch.tanh(F.dropout(hidden, 0.3)) * hidden


def test_torch_alone_draws_other_numbers_in_forks() -> None:
    """The defect that this package mends; if torch mends it, this module may go."""
    kept = outcome(lambda hidden, _: dropped(hidden), 0)
    again = outcome(lambda hidden, _: checkpoint(dropped, hidden, use_reentrant=False), 0)
    with pytest.raises(AssertionError):
        assert_same_bits(again, kept)


@pytest.mark.parametrize("wrap", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("graph_safe", [False, True], ids=["plain", "graph-safe"])
def test_forward_and_backward_in_forks_of_their_own(wrap: Any, graph_safe: bool) -> None:
    def forward_and_backward(wrap: Any) -> list[Tensor]:
        model_parallel_cuda_manual_seed(
            5, use_cudagraphable_rng=graph_safe, force_reset_rng=True, device="cpu"
        )
        hidden, tracker = torch.ones(4, WIDTH, requires_grad=True), get_cuda_rng_tracker()
        with tracker.fork(STREAMS[1]):
            torch.rand(3)
            output = wrap(dropped, hidden)
        with tracker.fork():
            torch.rand(5)
            output.sum().backward(retain_graph=wrap is not reentrant)
            first_draw = torch.rand(2)
            if wrap is not reentrant:  # torch frees what it needs for a second time
                output.sum().backward()
        grad = hidden.grad if wrap is not reentrant else 2 * hidden.grad
        return [output.detach(), grad, first_draw, *every_state()]

    kept = forward_and_backward(plain)
    assert_same_bits(forward_and_backward(wrap), kept)


def test_selective_checkpoints_keep_what_their_policy_says_and_repeat_the_rest() -> None:
    calls = []

    @torch.library.custom_op("mcore_parallel_tests::doubled", mutates_args=())
    def doubled(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return 2 * hidden

    doubled.register_autograd(lambda ctx, grad: 2 * grad)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = op == torch.ops.mcore_parallel_tests.doubled.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(hidden: Tensor) -> Tensor:
        return dropped(doubled(dropped(hidden)))

    selective = functools.partial(create_selective_checkpoint_contexts, policy)
    both = functools.partial(checkpoint_context_fn, selective)
    kept = outcome(lambda hidden, _: block(hidden), 0)
    again = outcome(
        lambda hidden, _: checkpoint(block, hidden, use_reentrant=False, context_fn=both), 0
    )
    assert_same_bits(again, kept)
    assert len(calls) == 2 + 2  # two micro-batches each time, and none of them once more


@pytest.mark.parametrize("wrap", KINDS.values(), ids=KINDS)
def test_an_error_in_the_function_leaves_the_streams_where_they_stand(
    wrap: Any, device: torch.device
) -> None:
    model_parallel_cuda_manual_seed(5, force_reset_rng=True, device=device)
    hidden = torch.ones(4, requires_grad=True, device=device)
    calls = []

    def failing(hidden: Tensor) -> Tensor:
        calls.append(len(calls))
        hidden = dropped(hidden)
        if len(calls) == 2:
            sys._clear_type_cache()  # what handles the error may look nothing up in a class
            raise ArithmeticError("the second time")
        return dropped(hidden)

    output = wrap(failing, hidden)
    before = every_state()
    with pytest.raises(ArithmeticError, match="the second time"):
        output.sum().backward()
    assert_same_bits(every_state(), before)
    with get_cuda_rng_tracker().fork():
        pass


def test_a_tracker_of_ones_own_and_a_shared_one_that_was_replaced() -> None:
    own = CudaRNGStatesTracker(device="cpu")
    own.add("dropout", 3)

    def drops(hidden: Tensor) -> Tensor:
        with own.fork("dropout"):
            return F.dropout(hidden) ** 2

    ones = torch.ones(64, requires_grad=True)
    for run in (
        lambda: checkpoint_activations(drops, False, ones, tracker=own),
        lambda: checkpoint(replay_rng_streams(drops, tracker=own), ones, use_reentrant=True),
    ):
        ones.grad = None
        output = run()
        model_parallel_cuda_manual_seed(7, force_reset_rng=True, device="cpu")  # another tracker
        output.sum().backward()
        assert torch.equal(ones.grad, 2 * output.detach())
    output = checkpoint_activations(dropped, False, ones)
    model_parallel_cuda_manual_seed(8, force_reset_rng=True, device="cpu")
    with pytest.raises(RuntimeError, match="replaced between"):
        output.sum().backward()


def test_without_gradients_and_without_a_tracker_it_is_a_plain_call() -> None:
    hidden = torch.ones(3)
    with torch.no_grad():
        assert checkpoint_activations(lambda *a: a, True, hidden, 1) == (hidden, 1)
    leaf = torch.ones(3, requires_grad=True)
    first, second = checkpoint_activations(lambda a, b: (a.exp(), {"b": b}), False, leaf, "text")
    first.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3).exp())
    assert second == {"b": "text"}
    assert shared.existing_tracker() is None


def test_an_inference_tracker_has_nothing_to_repeat() -> None:
    model_parallel_cuda_manual_seed(
        5, inference_rng_tracker=True, force_reset_rng=True, device="cpu"
    )
    leaf = torch.ones(64, requires_grad=True)
    output = checkpoint_activations(lambda h: dropped(h) ** 2, False, leaf)
    output.sum().backward()
    assert isinstance(get_cuda_rng_tracker().snapshot(), nullcontext)


@pytest.mark.parametrize("wrap", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("graph_safe", [False, True], ids=["plain", "graph-safe"])
def test_dropout_on_an_accelerator(wrap: Any, graph_safe: bool, accelerator: torch.device) -> None:
    """States and live handles are repeated, and left where they stood."""

    def run(wrap: Any) -> list[Tensor]:
        model_parallel_cuda_manual_seed(
            5, use_cudagraphable_rng=graph_safe, force_reset_rng=True, device=accelerator
        )
        leaf = torch.ones(64, WIDTH, device=accelerator, requires_grad=True)
        handles = get_cuda_rng_tracker().get_states()
        output = wrap(lambda hidden: wrap(dropped, hidden) * hidden, leaf)
        with get_cuda_rng_tracker().fork(STREAMS[1]):
            output.sum().backward()
        after = get_cuda_rng_tracker().get_states()
        if graph_safe:  # a graph that registered a handle draws from the stream itself
            for name, handle in handles.items():
                assert torch.equal(handle.get_state(), after[name].get_state())
        default = torch.get_device_module(accelerator).get_rng_state()
        return [output.detach().cpu(), leaf.grad.cpu(), default, *every_state()]

    assert_same_bits(run(wrap), run(plain))


# On two ranks: activations kept in parts, and fully sharded modules.


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 2)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return hidden + dropped(hidden @ self.weight) * scale


def layouts() -> list[Tensor]:
    values = torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(4))
    transposed = values.transpose(0, 1).contiguous().transpose(0, 1)
    return [values, transposed, values.bfloat16(), values[:1, :1], values[:0]]


def nested_bits(wrap: Any, values: Tensor) -> list[Tensor]:
    model_parallel_cuda_manual_seed(5, tp_rank=dist.get_rank(), force_reset_rng=True, device="cpu")
    leaf, block = values.clone().requires_grad_(), Block(1).to(values.dtype)
    assert leaf.stride() == values.stride()
    output = wrap(lambda hidden, scale: wrap(block, hidden, scale) * hidden, leaf, 0.5)
    output.float().square().sum().backward()
    return [output.detach(), leaf.grad, *every_state()]


def in_parts(function: Any, *args: Any) -> Tensor:
    return checkpoint_activations(function, True, *args, tp_group=dist.group.WORLD)


def keep_parts() -> None:
    for values in layouts():
        kept = nested_bits(lambda function, *args: function(*args), values)
        assert_same_bits(nested_bits(in_parts, values), kept)


def free_the_whole() -> None:
    """Between forward and backward no rank holds the input that was distributed."""
    strides, storages = [], []

    def second(hidden: Tensor) -> Tensor:
        strides.append(hidden.stride())
        return hidden.exp()

    leaf = torch.ones(8, 4, requires_grad=True)
    kept = {}
    for distributes in (False, True):
        hidden = (leaf + 1).t()
        storages.append(weakref.ref(hidden.untyped_storage()))
        with use_process_groups(ProcessGroups(tp=dist.group.WORLD)):
            output = checkpoint_activations(second, distributes, hidden)
        alive = weakref.ref(hidden)
        del hidden
        kept[distributes] = alive() is not None
        output.sum().backward()
    assert kept == {False: True, True: False}
    assert strides == [(1, 4)] * 4


def refuse_what_has_no_parts() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    for args, given_type in (((), "NoneType"), ((1,), "int"), ((whole,), "DTensor")):
        with pytest.raises(TypeError, match=f"first argument, got {given_type}"):
            checkpoint_activations(dropped, True, *args, tp_group=dist.group.WORLD)


class Net(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList(Block(seed) for seed in range(3)), wrap

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self.wrap(block, hidden)
        return hidden


def train_fully_sharded(wrap: Any, wraps_modules: bool = False) -> list[Tensor]:
    """Two micro-batches, sharded again after each forward, in bf16; every rank draws alike."""
    net, policy = Net(wrap), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for index, block in enumerate(net.blocks):
        if wraps_modules:
            net.blocks[index] = checkpoint_wrapper(block, context_fn=checkpoint_context_fn)
        fully_shard(net.blocks[index], mp_policy=policy, reshard_after_forward=True)
    fully_shard(net, mp_policy=policy)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True, device="cpu")
    results = []
    for _ in range(2):
        hidden = torch.ones(4, WIDTH, requires_grad=True)
        output = net(hidden)
        output.float().square().sum().backward()
        results += [output.detach(), hidden.grad]
    return [*results, *(p.grad.to_local() for p in net.parameters()), *every_state()]


def shard_fully() -> None:
    kept = train_fully_sharded(plain)
    for wrap in (*KINDS.values(), in_parts):
        assert_same_bits(train_fully_sharded(wrap), kept)
    assert_same_bits(train_fully_sharded(plain, wraps_modules=True), kept)


def test_on_two_ranks() -> None:
    run_ranks(on_two_ranks, 2)


def on_two_ranks() -> None:
    for check in (keep_parts, free_the_whole, refuse_what_has_no_parts, shard_fully):
        check()
