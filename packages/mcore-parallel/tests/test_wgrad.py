"""Deferred weight gradients: on one and two ranks against float64."""

from __future__ import annotations

import weakref
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel import (
    drain_embedding_wgrad_compute,
    prepare_input_tensors_for_wgrad_compute,
)
from mcore.tensor.buffers import destroy_global_memory_buffer, get_global_memory_buffer
from rank_testing import run_ranks

BATCH, HIDDEN, VOCAB = 2, 6, 10
COUNTS = (0, 1, 2, 3, 4, 5, 6, 7)


class MicroBatches:
    """Deferred pairs whose values every rank can compute, and the sum that they must give."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        self.inputs = [draw(length, BATCH, HIDDEN) for length in lengths]
        self.grads = [[draw(length, BATCH, VOCAB) for _ in range(2)] for length in lengths]

    def pairs(self, rank: int, ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's slices of the sequence, and its gradients of the whole sequence."""
        inputs = [full.chunk(ranks)[rank % ranks].clone() for full in self.inputs]
        return inputs, [grads[rank].clone() for grads in self.grads]

    def expected(self, rank: int) -> torch.Tensor:
        total = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
        for full, grads in zip(self.inputs, self.grads, strict=True):
            total += torch.einsum("sbv,sbh->vh", grads[rank].double(), full.double())
        return total


def weight_with(main_grad: torch.Tensor | None = None) -> Any:
    weight: Any = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    weight.main_grad = torch.zeros(VOCAB, HIDDEN) if main_grad is None else main_grad
    return weight


def config(*, sequence_parallel: bool) -> SimpleNamespace:
    return SimpleNamespace(sequence_parallel=sequence_parallel, gradient_accumulation_fusion=False)


def drain_twice(
    num: int, sequence_parallel: bool, dtype: torch.dtype, group: Any
) -> tuple[float, float, bool]:
    """The largest errors after one drain and after two, and whether the lists are empty."""
    rank = 0 if group is None else group.rank()
    ranks = 1 if group is None or not sequence_parallel else group.size()
    batches, weight = MicroBatches([8] * num, dtype), weight_with()
    errors = []
    emptied = True
    for times in (1, 2):
        inputs, grads = batches.pairs(rank, ranks)
        same_inputs, same_grads = inputs, grads
        drain_embedding_wgrad_compute(
            config(sequence_parallel=sequence_parallel), inputs, grads, weight, group
        )
        emptied = emptied and same_inputs == [] and same_grads == []
        errors.append(float((weight.main_grad - times * batches.expected(rank)).abs().max()))
    return errors[0], errors[1], emptied


CASES = list(product(COUNTS, (True, False), (torch.float32, torch.bfloat16)))


def drain_all_cases() -> list[tuple[float, float, bool]]:
    return [drain_twice(*case, dist.group.WORLD) for case in CASES]


def test_two_ranks_add_what_float64_gives() -> None:
    for rank, found in enumerate(run_ranks(drain_all_cases, 2)):
        for case, (once, twice, emptied) in zip(CASES, found, strict=True):
            assert once <= 1e-4, (rank, case)
            assert twice <= 1e-4, (rank, case)
            assert emptied, (rank, case)


@pytest.mark.parametrize(("num", "sequence_parallel", "dtype"), CASES, ids=str)
def test_one_rank_adds_what_float64_gives(num, sequence_parallel, dtype) -> None:
    once, twice, emptied = drain_twice(num, sequence_parallel, dtype, None)
    assert once <= 1e-4
    assert twice <= 1e-4
    assert emptied


def drain_odd_lengths() -> list[float]:
    rank, errors = dist.get_rank(), []
    for lengths in ([8, 4], [2, 8, 4, 12, 6], [12, 2]):
        destroy_global_memory_buffer()
        batches, weight = MicroBatches(lengths, torch.bfloat16), weight_with()
        inputs, grads = batches.pairs(rank, 2)
        strided = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in inputs]
        drain_embedding_wgrad_compute(
            config(sequence_parallel=True), strided, grads, weight, dist.group.WORLD
        )
        errors.append(float((weight.main_grad - batches.expected(rank)).abs().max()))
        kept = {name: buffer.numel() for (name, *_), buffer in buffers().items()}
        assert kept == {
            "wgrad_drain_0": max(lengths[::2]) * BATCH * HIDDEN,
            "wgrad_drain_1": max(lengths[1::2]) * BATCH * HIDDEN,
        }
    return errors


def buffers() -> dict[Any, torch.Tensor]:
    return get_global_memory_buffer().buffer


def test_micro_batches_may_differ_in_length_and_have_any_strides() -> None:
    for errors in run_ranks(drain_odd_lengths, 2):
        assert max(errors) <= 1e-4


def record_order() -> list[str]:
    """The order in which gathers start, end, and pairs are added."""
    import mcore.parallel.wgrad as wgrad

    events: list[str] = []
    gather, accumulate = wgrad.all_gather_single, wgrad.accumulate_wgrad

    class Waited:
        def __init__(self, work: Any, number: int) -> None:
            self.work, self.number = work, number

        def wait(self) -> None:
            events.append(f"wait {self.number}")
            self.work.wait()

    def start(*args: Any, **kwargs: Any) -> Waited:
        number = sum(event.startswith("gather") for event in events)
        events.append(f"gather {number}" if args[1].is_contiguous() else "gather what is strided")
        return Waited(gather(*args, **kwargs), number)

    def add(*args: Any, **kwargs: Any) -> None:
        events.append("gemm")
        accumulate(*args, **kwargs)

    wgrad.all_gather_single, wgrad.accumulate_wgrad = start, add  # type: ignore[assignment]
    inputs, grads = MicroBatches([4] * 3, torch.float32).pairs(dist.get_rank(), 2)
    strided = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in inputs]
    drain_embedding_wgrad_compute(
        config(sequence_parallel=True), strided, grads, weight_with(), dist.group.WORLD
    )
    return events


def test_the_next_gather_runs_during_a_gemm() -> None:
    first, second = run_ranks(record_order, 2)
    assert first == second
    assert first[:4] == ["gather 0", "gather 1", "wait 0", "gemm"]
    assert first[4:] == ["gather 2", "wait 1", "gemm", "wait 2", "gemm"]


def failure(*args: Any) -> str:
    try:
        drain_embedding_wgrad_compute(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def drain_what_one_rank_has_wrong() -> list[Any]:
    rank, world = dist.get_rank(), dist.group.WORLD
    bad = rank == 1
    found: list[Any] = []

    def run(lengths: list[int], change: Any, weight: Any) -> None:
        inputs, grads = MicroBatches(lengths, torch.float32).pairs(rank, 2)
        if bad:
            change(inputs, grads)
        counts = len(inputs), len(grads)
        text = failure(config(sequence_parallel=True), inputs, grads, weight, world)
        found.append((text, (len(inputs), len(grads)) == counts, weight.main_grad))

    run([4, 4], lambda inputs, grads: grads.pop(), weight_with())
    run([4, 4], lambda inputs, grads: (inputs.pop(), grads.pop()), weight_with())
    run([4, 4], lambda inputs, grads: (inputs.clear(), grads.clear()), weight_with())
    run(
        [4, 4],
        lambda inputs, grads: grads.reverse() or grads.append(grads.pop()[:2]),
        weight_with(),
    )
    run([4, 2] if bad else [2, 4], lambda inputs, grads: None, weight_with())
    weight = weight_with()
    if bad:
        weight.main_grad = None
    run([4], lambda inputs, grads: None, weight)
    run([4], lambda inputs, grads: None, weight_with(torch.zeros(3, 3) if bad else None))
    found[-1] = (*found[-1][:2], None)
    run([4, 4], lambda inputs, grads: None, weight_with())
    return found


def test_what_one_rank_has_wrong_is_an_error_on_all_before_anything_is_added() -> None:
    first, second = run_ranks(drain_what_one_rank_has_wrong, 2)
    kinds = ["ValueError"] * 5 + ["RuntimeError", "ValueError"]
    texts = [
        "2 activations and 1 gradients",
        "different arguments: embedding_activation_buffer ([",
        "different arguments: embedding_activation_buffer ([",
        "micro-batch 1: an activation of shape (2, 2, 6) on each of 2 ranks",
        "different arguments: embedding_activation_buffer ([",
        "main_grad is None",
        "do not fit main_grad of shape (3, 3)",
    ]
    for found in (first, second):
        for (text, untouched, main_grad), kind, part in zip(found, kinds, texts, strict=False):
            assert text.startswith(kind + ": "), text
            assert part in text
            assert untouched
            assert main_grad is None or not main_grad.any()
        assert found[-1][0] == "no error"  # the group still works
        assert found[-1][2].any()
    assert "rank 1 of the process group failed" in first[0][0]


def fail_in_the_middle() -> tuple[str, int, int, float]:
    import mcore.parallel.wgrad as wgrad

    rank, accumulate, gather = dist.get_rank(), wgrad.accumulate_wgrad, wgrad.all_gather_single
    added: list[int] = []
    waited: list[bool] = []

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work, self.number = work, len(waited)
            waited.append(False)

        def wait(self) -> None:
            self.work.wait()
            waited[self.number] = True

    wgrad.all_gather_single = lambda *args, **kwargs: Waited(  # type: ignore[assignment]
        gather(*args, **kwargs)
    )

    def break_at_the_second(*args: Any, **kwargs: Any) -> None:
        if len(added) == 1:
            raise MemoryError("no room")
        added.append(1)
        accumulate(*args, **kwargs)

    wgrad.accumulate_wgrad = break_at_the_second
    batches, weight = MicroBatches([4] * 4, torch.float32), weight_with()
    inputs, grads = batches.pairs(rank, 2)
    text = failure(config(sequence_parallel=True), inputs, grads, weight, dist.group.WORLD)
    wgrad.accumulate_wgrad = accumulate
    left = len(inputs), len(grads)
    assert waited == [True] * 3  # also the one that was under way when it failed
    drain_embedding_wgrad_compute(
        config(sequence_parallel=True), inputs, grads, weight, dist.group.WORLD
    )
    return text, *left, float((weight.main_grad - batches.expected(rank)).abs().max())


def test_after_an_error_the_pairs_that_were_not_added_can_be_drained_again() -> None:
    for text, inputs_left, grads_left, error in run_ranks(fail_in_the_middle, 2):
        assert text == "MemoryError: no room"
        assert inputs_left == grads_left == 3
        assert error <= 1e-4


def drain_outside_the_group() -> list[str]:
    pair = dist.new_group([0, 1])
    found = []
    for sequence_parallel in (True, False):
        rank = min(dist.get_rank(), 1)
        ranks = 2 if sequence_parallel else 1
        inputs, grads = MicroBatches([4], torch.float32).pairs(rank, ranks)
        settings = config(sequence_parallel=sequence_parallel)
        found.append(failure(settings, inputs, grads, weight_with(), pair) + f" {len(inputs)}")
    return found


def test_a_rank_outside_the_group_gets_an_error() -> None:
    *inside, outside = run_ranks(drain_outside_the_group, 3)
    assert inside == [["no error 0", "no error 0"]] * 2
    for text in outside:
        assert text.startswith("ValueError: rank 2 is not a member")
        assert text.endswith(" 1")


def drain_alone(inputs: list[torch.Tensor], grads: list[torch.Tensor], weight: Any) -> None:
    drain_embedding_wgrad_compute(config(sequence_parallel=True), inputs, grads, weight, None)


def test_lists_of_different_length_are_refused_and_left_alone() -> None:
    inputs, grads = MicroBatches([4, 4], torch.float32).pairs(0, 1)
    del grads[1]
    with pytest.raises(ValueError, match="2 activations and 1 gradients"):
        drain_alone(inputs, grads, weight_with())
    assert (len(inputs), len(grads)) == (2, 1)


@pytest.mark.usefixtures("on_each_device")
def test_nothing_deferred_needs_no_main_grad() -> None:
    weight = weight_with()
    del weight.main_grad
    drain_alone([], [], weight)
    assert not hasattr(weight, "main_grad")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_integer_main_grads_are_refused(dtype: torch.dtype) -> None:
    inputs, grads = MicroBatches([4], torch.float32).pairs(0, 1)
    weight = weight_with(torch.zeros(VOCAB, HIDDEN, dtype=dtype))
    with pytest.raises(RuntimeError, match=f"Unsupported gradient type {dtype}"):
        drain_alone(inputs, grads, weight)
    assert len(inputs) == 1


def test_a_missing_main_grad_is_refused() -> None:
    inputs, grads = MicroBatches([4], torch.float32).pairs(0, 1)
    weight = weight_with()
    del weight.main_grad
    with pytest.raises(RuntimeError, match="main_grad is None"):
        drain_alone(inputs, grads, weight)
    assert len(inputs) == 1


def test_main_grad_is_added_to_in_place_and_marked_only_where_there_is_a_mark() -> None:
    batches, weight = MicroBatches([4], torch.bfloat16), weight_with()
    main_grad = weight.main_grad
    drain_alone(*batches.pairs(0, 1), weight)
    assert weight.main_grad is main_grad
    assert not hasattr(weight, "grad_added_to_main_grad")
    weight.grad_added_to_main_grad = False
    drain_alone([], [], weight)
    assert weight.grad_added_to_main_grad is False
    drain_alone(*batches.pairs(0, 1), weight)
    assert weight.grad_added_to_main_grad is True


def test_a_sharded_weight_is_asked_for_its_main_grad_before_every_pair() -> None:
    batches, weight = MicroBatches([4, 2, 6], torch.float32), weight_with()
    del weight.main_grad
    total, asked = torch.zeros(VOCAB, HIDDEN), []

    def get_main_grad() -> torch.Tensor:
        asked.append(float(total.abs().sum()))
        return total

    weight.__fsdp_param__, weight.get_main_grad = True, get_main_grad
    drain_alone(*batches.pairs(0, 1), weight)
    assert asked[0] == 0 < asked[1] != asked[2]
    assert weight.main_grad is total
    assert (total - batches.expected(0)).abs().max() <= 1e-4


def test_a_pair_is_let_go_before_the_next_one_is_added(monkeypatch) -> None:
    import mcore.parallel.wgrad as wgrad

    inputs, grads = MicroBatches([4] * 3, torch.float32).pairs(0, 1)
    references = [
        [weakref.ref(tensor) for tensor in pair] for pair in zip(inputs, grads, strict=True)
    ]
    alive: list[int] = []

    def count(*args: Any, **kwargs: Any) -> None:
        alive.append(sum(any(ref() is not None for ref in pair) for pair in references))

    monkeypatch.setattr(wgrad, "accumulate_wgrad", count)
    drain_alone(inputs, grads, weight_with())
    assert alive == [3, 2, 1]


def test_a_graph_is_neither_needed_nor_built() -> None:
    batches, weight = MicroBatches([4], torch.float32), weight_with()
    inputs, grads = batches.pairs(0, 1)
    inputs[0].requires_grad_()
    drain_alone(inputs, grads, weight)
    assert not weight.main_grad.requires_grad
    assert (weight.main_grad - batches.expected(0)).abs().max() <= 1e-4


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("leading", [(6,), (3, 2), (1, 3, 2)])
def test_leading_dimensions_become_rows(leading: tuple[int, ...]) -> None:
    grad, full = torch.randn(*leading, 5), torch.randn(*leading, 4)
    flat_grad, flat_full = prepare_input_tensors_for_wgrad_compute(grad, full)
    assert torch.equal(flat_grad, grad.reshape(6, 5))
    assert torch.equal(flat_full, full.reshape(6, 4))
    assert flat_grad.data_ptr() == grad.data_ptr()  # nothing is copied


@pytest.mark.usefixtures("on_each_device")
def test_contiguous_matrices_are_returned_as_they_are() -> None:
    grad, full = torch.zeros(6, 5), torch.zeros(6, 4)
    found = prepare_input_tensors_for_wgrad_compute(grad, full)
    assert found[0] is grad
    assert found[1] is full


@pytest.mark.usefixtures("on_each_device")
def test_each_tensor_is_flattened_for_itself() -> None:
    grad, full = torch.randn(6, 5), torch.randn(3, 2, 4)
    flat_grad, flat_full = prepare_input_tensors_for_wgrad_compute(grad, full)
    assert flat_grad is grad
    assert flat_full.shape == (6, 4)


@pytest.mark.usefixtures("on_each_device")
def test_other_memory_formats_become_plain() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    strided = torch.randn(5, 24).t()
    flat_image, flat_strided = prepare_input_tensors_for_wgrad_compute(image, strided)
    assert flat_image.is_contiguous()
    assert flat_strided.is_contiguous()
    assert torch.equal(
        flat_image, torch.stack([row for block in image for plane in block for row in plane])
    )
    assert torch.equal(flat_strided, strided)


@pytest.mark.usefixtures("on_each_device")
def test_empty_last_dimensions_keep_their_rows() -> None:
    flat, _ = prepare_input_tensors_for_wgrad_compute(torch.zeros(3, 2, 0), torch.zeros(6, 4))
    assert flat.shape == (6, 0)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("grad", "full", "text"),
    [
        ((4, 2, 5), (4, 1, 3), "has 8 rows and an input"),
        ((4, 5), (5, 3), "has 4 rows and an input"),
        ((4,), (4, 3), "two dimensions or more"),
        ((4, 3), (), "two dimensions or more"),
    ],
)
def test_rows_that_do_not_match_are_refused(grad, full, text) -> None:
    with pytest.raises(ValueError, match=text):
        prepare_input_tensors_for_wgrad_compute(torch.zeros(grad), torch.zeros(full))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks the drain on a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drain_on_a_cuda_device(dtype: torch.dtype) -> None:
    batches = MicroBatches([8, 4, 6], dtype)
    weight = weight_with(torch.zeros(VOCAB, HIDDEN, device="cuda"))
    inputs, grads = ([tensor.cuda() for tensor in side] for side in batches.pairs(0, 1))
    drain_alone(inputs, grads, weight)
    assert (weight.main_grad.cpu() - batches.expected(0)).abs().max() <= 1e-3
