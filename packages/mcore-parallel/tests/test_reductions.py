"""Reductions: hand-computed results on real ranks."""

from __future__ import annotations

import math
import struct
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore.parallel import (
    ProcessGroups,
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
    reduce_step_stats,
    use_process_groups,
)
from mcore.parallel.agreement import max_or_raise
from mcore.parallel.reductions import encode_double, encode_double_tensor
from rank_testing import run_ranks
from standin.guard import find_problem

NAN = math.nan
INF = math.inf

lacks_device = pytest.mark.skipif(find_problem() is not None, reason=f"{find_problem()}")
each_group = pytest.mark.parametrize(
    "init", ["gloo", pytest.param("standin:standin_nccl", marks=lacks_device)]
)

# what ranks 0 and 1 give, what both get
STATS: list[tuple[Any, Any, float | None]] = [
    (None, 3.5, 3.5),
    (None, None, None),
    (-5, -1, -1.0),
    (-5, None, -5.0),
    (-1, None, -1.0),
    (-1.0, -1.0, -1.0),
    (NAN, 1.0, NAN),
    (1.0, NAN, NAN),
    (NAN, None, NAN),
    (NAN, INF, NAN),
    (0.1, 0.05, 0.1),
    (-INF, None, -INF),
    (-INF, -1e300, -1e300),
    (1e300, INF, INF),
    (-0.0, -1.0, -0.0),
    (5e-324, 0.0, 5e-324),
    (2**53 + 2, 1, float(2**53 + 2)),
    (torch.tensor(2.5), None, 2.5),
    (torch.tensor([7.5], requires_grad=True), torch.tensor(8, dtype=torch.int32), 8.0),
    (torch.tensor(0.1, dtype=torch.float64), 0.05, 0.1),
    (np.float64(0.1), np.float32(0.25), 0.25),
    (True, 0.5, 1.0),
]
FLAGS: list[tuple[Any, Any, bool]] = [
    (True, True, True),
    (True, False, False),
    (False, True, False),
    (False, False, False),
    (np.True_, np.True_, True),
    (np.True_, np.False_, False),
    (2, 1, True),
    (1, 0, False),
    (torch.tensor(True), torch.tensor([1.5]), True),
    (torch.tensor(2), torch.tensor(0), False),
    ("text", [0], True),
    (NAN, True, True),
]
REPORTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        {"a": 1.5, "alloc_retries": 2},
        {"alloc_retries": 5, "a": 1.0},
        {"a": 1.5, "alloc_retries": 5},
        {"alloc_retries": 5, "a": 1.5},
    ),
    *(
        ({"x": mine}, {"x": other}, {"x": largest}, {"x": largest})
        for mine, other, largest in [
            (2**53 + 1, 0, 2**53 + 1),
            (-(2**63), -(2**63) + 1, -(2**63) + 1),
            (-(2**63), -(2**63), -(2**63)),
            (2**63 - 1, 0, 2**63 - 1),
            (True, False, True),
            (False, False, False),
            (np.bool_(False), np.bool_(True), True),
            (NAN, 1.0, NAN),
            (1.0, NAN, NAN),
            (-3.5, -2.25, -2.25),
            (1, 1.5, 1.5),
            (3, 1.5, 3.0),
            (NAN, 3, NAN),
            (np.int64(4), np.float32(0.5), 4.0),
            (torch.tensor(4), 3, 4),
            (True, 5, 5),
        ]
    ),
    ({}, {}, {}, {}),
]


def same(found: object, wanted: object) -> bool:
    """Equal in type, value and sign of zero, where NaN equals NaN."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[k], wanted[k]) for k in found)
    if type(found) is not type(wanted):
        return False
    if isinstance(found, float) and isinstance(wanted, float):
        bits = struct.pack("<d", found) == struct.pack("<d", wanted)
        return bits or (math.isnan(found) and math.isnan(wanted))
    return found == wanted


def reduce_everything() -> tuple[list[Any], list[Any], list[Any]]:
    rank, world = dist.get_rank(), dist.group.WORLD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = [reduce_max_stat_across_model_parallel_group(s[rank], world) for s in STATS]
    flags = [logical_and_across_model_parallel_group(f[rank], world) for f in FLAGS]
    reports = [reduce_max_memory_across_pp_group(r[rank], world) for r in REPORTS]
    return stats, flags, reports


@each_group
def test_every_case_on_two_ranks(init: str) -> None:
    for rank, (stats, flags, reports) in enumerate(run_ranks(reduce_everything, 2, init=init)):
        for case, found in zip(STATS, stats, strict=True):
            assert same(found, case[2]), (rank, case, found)
        for case, found in zip(FLAGS, flags, strict=True):
            assert found is case[2], (rank, case, found)
        for case, found in zip(REPORTS, reports, strict=True):
            assert same(found, case[2 + rank]), (rank, case, found)


def agree_on_random_doubles() -> bool:
    bits = torch.randint(-(2**63), 2**63 - 1, (2, 2000), generator=torch.Generator().manual_seed(0))
    doubles = bits.view(torch.float64)
    stats = {str(i): float(value) for i, value in enumerate(doubles[dist.get_rank()])}
    found, _ = reduce_step_stats(stats, {}, dist.group.WORLD)
    wanted = doubles.amax(dim=0)  # torch's maximum hands NaN on
    return all(same(found[str(i)], float(value)) for i, value in enumerate(wanted))


def test_random_doubles_on_two_ranks() -> None:
    assert run_ranks(agree_on_random_doubles, 2) == [True, True]


def reduce_one_step() -> tuple[Any, list[str]]:
    rank, calls = dist.get_rank(), []
    all_reduce = dist.all_reduce

    def count(tensor: torch.Tensor, **kwargs: Any) -> Any:
        calls.append(f"{tensor.dtype} {tuple(tensor.shape)}")
        return all_reduce(tensor, **kwargs)

    dist.all_reduce = count
    stats = [{"norm": 0.1, "zeros": None, "scale": torch.tensor(4.0)}]
    stats += [{"scale": 8, "norm": 0.05, "zeros": None}]
    flags = [{"ok": True, "finite": torch.tensor(True)}, {"finite": np.True_, "ok": 0}]
    result = reduce_step_stats(stats[rank], flags[rank], dist.group.WORLD)
    return result, calls


@each_group
def test_a_step_is_one_collective(init: str) -> None:
    first, second = run_ranks(reduce_one_step, 2, init=init)
    assert first[1] == second[1] == ["torch.int64 (64,)"]
    assert same(first[0][0], {"norm": 0.1, "zeros": None, "scale": 8.0})
    assert same(second[0][0], {"scale": 8.0, "norm": 0.1, "zeros": None})
    assert same(first[0][1], {"ok": False, "finite": True})
    assert same(second[0][1], {"finite": True, "ok": False})


def failure(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        return str(call(*args, **kwargs))
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def bad_values_on_rank_1() -> list[str]:
    rank, world = dist.get_rank(), dist.group.WORLD
    bad = rank == 1
    memory = reduce_max_memory_across_pp_group
    array = np.array([True, False])
    return [
        failure(reduce_max_stat_across_model_parallel_group, torch.zeros(2) if bad else 1.0, world),
        failure(reduce_max_stat_across_model_parallel_group, "1.5" if bad else 1.0, world),
        failure(logical_and_across_model_parallel_group, array if bad else True, world),
        failure(logical_and_across_model_parallel_group, torch.zeros(2) if bad else True, world),
        failure(memory, {"a": "text" if bad else 1}, world),
        failure(memory, {"a": 2**63 if bad else 1}, world),
        failure(reduce_step_stats, {"a": 1j if bad else 1}, {"b": True}, world),
        failure(memory, None if bad else {"a": 1}, world),
        failure(reduce_step_stats, [1.0] if bad else {"a": 1}, {}, world),
        failure(reduce_step_stats, {}, None if bad else {}, world),
        failure(memory, {"b" if bad else "a": 1}, world),
        failure(memory, {"a": 1, "b": 2} if bad else {"a": 1}, world),
        failure(memory, {} if bad else {"a": 1}, world),
        failure(memory, {str(i): 1 for i in range(80 if bad else 20)}, world),
        failure(reduce_step_stats, {"a": 1, "b": 2} if bad else {"a": 1}, {"c": True}, world),
        failure(reduce_step_stats, {}, {"a": True} if bad else {}, world),
        failure(reduce_step_stats, {"b" if bad else "a": 1}, {}, world),
        failure(reduce_step_stats, {"a": 1} if bad else {}, {} if bad else {"a": 1}, world),
        failure(reduce_max_stat_across_model_parallel_group, float(rank), world),
    ]


@each_group
def test_what_one_rank_cannot_encode_raises_on_all(init: str) -> None:
    first, second = run_ranks(bad_values_on_rank_1, 2, init=init)
    kinds = [found.split(":")[0] for found in second[:10]]
    assert kinds == [
        *("TypeError", "TypeError", "ValueError", "TypeError", "TypeError", "OverflowError"),
        *("TypeError", "TypeError", "TypeError", "TypeError"),
    ]
    for here, there in zip(first[:10], second[:10], strict=True):
        kind, _, text = there.partition(": ")
        assert here == f"{kind}: rank 1 of the process group failed: {text}"
    assert "(2,)" in first[0]
    assert "the string '1.5'" in first[1]
    assert "a is 9223372036854775808" in first[5]
    assert "expected values by name, got list" in first[8]
    for found in (*first[10:-1], *second[10:-1]):
        assert found.startswith("ValueError: the ranks of the process group disagree")
    assert "(global rank 1) has keys (2): 'a', 'b'. The first rank has keys (1): 'a'" in second[11]
    assert "(global rank 0) has keys (1): 'a'. Other ranks have other values" in first[11]
    assert first[-1] == second[-1] == "1.0"  # the group still works


def reduce_on_some_ranks() -> list[Any]:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    found: list[Any] = [
        failure(reduce_max_stat_across_model_parallel_group, float(rank), pair),
        failure(logical_and_across_model_parallel_group, rank < 2, pair),
        failure(reduce_max_memory_across_pp_group, {"a": rank}, pair),
        failure(reduce_step_stats, {"a": rank}, {"b": True}, pair),
    ]
    pgs = ProcessGroups.from_sizes(pp=3, groups=("pp", "mp"))
    with use_process_groups(pgs):
        found += [
            reduce_max_stat_across_model_parallel_group(rank, None),
            logical_and_across_model_parallel_group(rank < 2, None),
            reduce_max_memory_across_pp_group({"a": rank}, None),
            reduce_step_stats({"a": rank}, {"b": True}, None),
        ]
    return found


def test_members_defaults_and_non_members() -> None:
    outside, *inside = run_ranks(reduce_on_some_ranks, 3)
    for found in outside[:4]:
        assert found.startswith("ValueError: rank 0 is not a member")
    for found in inside:
        assert found[:4] == ["2.0", "False", "{'a': 2}", "({'a': 2.0}, {'b': True})"]
    for found in (outside, *inside):
        assert found[4:] == [2.0, False, {"a": 2}, ({"a": 2.0}, {"b": True})]


@pytest.mark.parametrize("world", ["none", "no group", "one rank"])
def test_alone_the_answer_is_local(fake_world, world: str) -> None:
    if world != "none":
        fake_world(1, 2)
    group = dist.new_group([1]) if world == "one rank" else None
    assert same(reduce_max_stat_across_model_parallel_group(3, group), 3.0)
    assert same(reduce_max_stat_across_model_parallel_group(torch.tensor(2.5), group), 2.5)
    assert reduce_max_stat_across_model_parallel_group(None, group) is None
    assert logical_and_across_model_parallel_group(np.True_, group) is True
    assert logical_and_across_model_parallel_group(torch.tensor(0), group) is False
    report: dict[str, int | float] = {"b": 1, "a": 2.5}
    found = reduce_max_memory_across_pp_group(report, group)
    assert same(found, report)
    assert found is not report
    assert reduce_step_stats({"a": 1, "b": None}, {"c": 1}, group) == (
        {"a": 1.0, "b": None},
        {"c": True},
    )


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(0), torch.tensor(1j), "1.5", 1j])
def test_alone_the_same_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        reduce_max_stat_across_model_parallel_group(value, None)
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        with pytest.raises(TypeError, match="one element"):
            logical_and_across_model_parallel_group(value, None)
        with pytest.raises(TypeError, match="one element"):
            reduce_step_stats({}, {"flag": value}, None)


@pytest.mark.parametrize("world_size", [2, 8192])
def test_messages_do_not_grow_with_the_world(fake_world, monkeypatch, world_size: int) -> None:
    fake_world(0, world_size)
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda t, **kwargs: sent.append(t.nbytes))
    world = dist.group.WORLD
    reduce_max_stat_across_model_parallel_group(1.0, world)
    logical_and_across_model_parallel_group(True, world)
    reduce_max_memory_across_pp_group({f"key {i}": i for i in range(12)}, world)
    reduce_max_memory_across_pp_group({f"key {i}": i for i in range(40)}, world)
    assert sent == [512, 512, 512, 512, 8 * (3 + 2 * 40 - 64)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks tensors of an nccl group")
def test_no_wait_for_the_gpu_before_the_collective(monkeypatch) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    all_reduce = dist.all_reduce

    def allow_syncs_from_here(tensor: torch.Tensor, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return all_reduce(tensor, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", allow_syncs_from_here)
    try:
        stat = torch.tensor(0.1, dtype=torch.float64, device="cuda")
        dist.all_reduce(stat.clone())  # make the communicator
        torch.cuda.set_sync_debug_mode("error")
        codes = [encode_double_tensor(stat), encode_double(-0.5)]
        assert max_or_raise(codes, [], dist.group.WORLD) == [
            encode_double(0.1),
            encode_double(-0.5),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
