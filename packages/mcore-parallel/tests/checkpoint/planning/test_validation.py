"""The check that all shards make whole tensors, on layouts that are right and wrong by hand."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import SavePlan

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedLoadPlanner,
    ShardedObject,
    ShardedSavePlanner,
    ShardedTensor,
    ShardRecord,
    describe_shards,
    validate_plans,
    validate_sharding_integrity,
)
from mcore.parallel.checkpoint.planning.description import decode_records, encode_records
from mcore.parallel.checkpoint.planning.validation import Box, overlapping_pairs
from rank_testing import run_ranks


def shard(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    whole: tuple[int, ...] = (8, 4),
    **changes: Any,
) -> ShardRecord:
    record = ShardRecord("tensor", "w", True, "float32", whole, offset, shape)
    return record._replace(**changes)


TOP, BOTTOM = shard((0, 0), (4, 4)), shard((4, 0), (4, 4))
UNWRITTEN = ShardRecord("tensor", "w", False, "float32", (8, 4))


@pytest.mark.parametrize(
    "ranks",
    [
        [[TOP], [BOTTOM]],
        [[TOP, BOTTOM], [UNWRITTEN]],
        [[shard((0, 0), (5, 4))], [shard((5, 0), (3, 4))], [shard((8, 0), (0, 4))]],
        [[shard((), (), ())]],
        [[shard((0,), (0,), (0,))], [shard((0,), (0,), (0,))]],
        [
            [ShardRecord("object", "o", True, "", (2,), (0,))],
            [ShardRecord("object", "o", True, "", (2,), (1,))],
        ],
        [
            [ShardRecord("object", "o", True, "", (1,), (0,))],
            *[[ShardRecord("object", "o", False, "", (1,))]] * 2,
        ],
        [[TOP, BOTTOM], [UNWRITTEN], [UNWRITTEN]],
        [[], []],
    ],
)
def test_whole_tensors_have_no_problem(ranks: list[list[ShardRecord]]) -> None:
    assert validate_plans(ranks) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[TOP, BOTTOM], [BOTTOM]], ["'w'", "ranks 0-1 write the same shard", "(4, 0)"]),
        ([[TOP], [UNWRITTEN]], ["'w'", "16 elements", "has 32", "rank 1", "replica_id 0"]),
        ([[UNWRITTEN], [UNWRITTEN]], ["'w'", "0 elements", "has 32", "ranks 0-1"]),
        ([[TOP]], ["16 elements", "some shard is on no rank"]),
        ([[shard((0, 0), (5, 4))], [BOTTOM]], ["rank 0", "rank 1", "overlap"]),
        ([[TOP], [shard((2, 0), (4, 4))]], ["rank 0", "rank 1", "overlap"]),  # as many elements
        ([[TOP], [shard((6, 0), (4, 4))]], ["rank 1", "outside the global shape (8, 4)"]),
        ([[TOP], [shard((4, 0), (4, 4), dtype="int32")]], ["dtype differs", "float32 on rank 0"]),
        ([[TOP], [shard((4, 0), (4, 4), (9, 4))]], ["global_shape differs", "(9, 4) on rank 1"]),
        ([[TOP], [shard((4, 0), (4, 4), prepend_axis_num=1)]], ["prepend_axis_num differs"]),
        ([[TOP, BOTTOM], [UNWRITTEN._replace(dtype="int8")]], ["dtype differs", "int8 on rank 1"]),
        ([[TOP, BOTTOM, ShardRecord("common", "w", True)]], ["a common and a tensor entry"]),
        (
            [[ShardRecord("object", "o", True, "", (2,), (0,))]] * 2,
            ["object 'o'", "ranks 0-1 write the same object (0,)", "1 of 2 objects"],
        ),
        ([[ShardRecord("object", "o", False, "", (1,))]], ["0 of 1 objects", "rank 0"]),
    ],
)
def test_each_problem_is_named_with_key_and_ranks(
    ranks: list[list[ShardRecord]], words: list[str]
) -> None:
    text = "\n".join(validate_plans(ranks))
    assert [word for word in words if word not in text] == []


def test_one_rank_that_writes_a_shard_twice_is_named() -> None:
    [text] = validate_plans([[TOP, BOTTOM, BOTTOM]])
    assert "rank 0 (rank 0 more than once) write the same shard" in text


START, SIZE = st.integers(0, 6), st.integers(1, 4)
BOX = st.tuples(*[st.tuples(START, SIZE)] * 3)
OF_ANY_SHAPES = st.lists(BOX, min_size=0, max_size=12, unique=True)
OF_ONE_SHAPE = st.tuples(SIZE, SIZE, SIZE).flatmap(
    lambda shape: st.lists(
        st.tuples(*(st.tuples(START, st.just(size)) for size in shape)), max_size=12, unique=True
    )
)


@settings(deadline=None)
@given(OF_ANY_SHAPES | OF_ONE_SHAPE)
def test_overlaps_equal_those_of_counting_elements(raw: list[Any]) -> None:
    places: list[Box] = [
        (tuple(start for start, _ in place), tuple(size for _, size in place)) for place in raw
    ]

    def elements(place: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(s, s + n) for s, n in zip(*place, strict=True))))

    expected = [
        (first, second)
        for first, second in itertools.combinations(range(len(places)), 2)
        if elements(places[first]) & elements(places[second])
    ]
    assert overlapping_pairs(places) == expected


@settings(deadline=None)
@given(
    st.lists(st.tuples(SIZE, SIZE), min_size=1, max_size=3),
    st.sampled_from(["whole", "twice", "lost", "moved", "wider", "replica"]),
    st.data(),
)
def test_a_grid_is_whole_if_each_element_is_written_once(
    axes: list[tuple[int, int]], change: str, data: st.DataObject
) -> None:
    size, whole = tuple(size for size, _ in axes), tuple(size * count for size, count in axes)
    cells = itertools.product(*(range(count) for _, count in axes))
    starts = [tuple(s * n for s, n in zip(cell, size, strict=True)) for cell in cells]
    records = [shard(start, size, whole) for start in data.draw(st.permutations(starts))]
    if change == "twice":
        records[0] = records[0]._replace(global_offset=records[-1].global_offset)
    elif change == "lost":
        del records[0]
    elif change == "moved":
        by = data.draw(st.integers(-2, 2))
        first, *rest = records[0].global_offset
        records[0] = records[0]._replace(global_offset=(first + by, *rest))
    elif change == "wider":
        whole = (whole[0] + 1, *whole[1:])
        records = [one._replace(global_shape=whole) for one in records]
    elif change == "replica":
        records.append(ShardRecord("tensor", "w", False, "float32", whole))
    written = [
        element
        for one in records
        if one.is_written
        for element in itertools.product(
            *(range(s, s + n) for s, n in zip(one.global_offset, one.shard_shape, strict=True))
        )
    ]
    is_whole = sorted(written) == sorted(itertools.product(*map(range, whole)))
    assert (validate_plans([[one] for one in records]) == []) is (is_whole or not records)


def test_a_box_of_other_axes_is_no_part_of_a_grid() -> None:
    [first, *_] = validate_plans([[shard((0, 0), (4, 4))], [shard((4,), (0, 4, 4))]])
    assert "outside the global shape (8, 4)" in first


def test_records_survive_the_wire() -> None:
    records = [TOP, UNWRITTEN, ShardRecord("common", "a.b", True), shard((), (), ())]
    assert decode_records(encode_records(records)) == records


def test_descriptions_of_unwritten_replicas_are_listed_once() -> None:
    layers = {
        f"layer{index}": ShardedTensor.from_rank_offsets(
            "stack", torch.zeros(2), (0, index, 3), replica_id=(0, 0, 1), prepend_axis_num=1
        )
        for index in range(3)
    }
    assert describe_shards(layers) == [
        ShardRecord("tensor", "stack", False, "float32", (3, 2), prepend_axis_num=1)
    ]


def rank_of(tp: int, pp: int, dp: int, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """A rank's state dict: ten tensors, cut over tp, stacked over pp, replicated over dp."""
    tp_size, pp_size, _ = sizes
    local = torch.empty(4, 8, device="meta")
    shards: dict[str, Any] = {}
    for layer in range(5):
        index = pp * 5 + layer
        shards[f"w{layer}"] = ShardedTensor.from_rank_offsets(
            "layers.weight",
            local,
            (0, index, 5 * pp_size),
            (1, tp, tp_size),
            replica_id=(0, 0, dp),
            prepend_axis_num=1,
        )
        shards[f"n{layer}"] = ShardedTensor.from_rank_offsets(
            "layers.norm",
            local,
            (0, index, 5 * pp_size),
            replica_id=(0, tp, dp),
            prepend_axis_num=1,
        )
    return shards


def calls_in(work: Callable[[], Any]) -> int:
    """How many Python functions some work calls, which tells its cost on any machine."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@functools.cache
def records_of(tp: int, pp: int, dp: int, sizes: tuple[int, int, int]) -> list[ShardRecord]:
    return describe_shards(rank_of(tp, pp, dp, sizes))


def records_of_ranks(sizes: tuple[int, int, int]) -> list[list[ShardRecord]]:
    """Of all ranks; those that write nothing differ in nothing that is recorded."""
    tp_size, pp_size, dp_size = sizes
    return [
        records_of(tp, pp, min(dp, 1), sizes)
        for pp in range(pp_size)
        for dp in range(dp_size)
        for tp in range(tp_size)
    ]


def test_8192_ranks_are_checked_in_one_process() -> None:
    ranks, half = records_of_ranks((8, 16, 64)), records_of_ranks((8, 8, 64))
    assert (len(ranks), len(half)) == (8192, 4096)
    assert sum(record.is_written for rank in ranks for record in rank) == 16 * 5 * (8 + 1)
    assert validate_plans(ranks) == []
    calls, calls_of_half = (
        calls_in(lambda some=some: validate_plans(some)) for some in (ranks, half)
    )
    assert calls < 2.5 * calls_of_half
    assert calls < 2 * len(ranks)
    ranks[8 * 64 + 3] = ranks[8 * 64 + 2]
    text = "\n".join(validate_plans(ranks))
    assert "'layers.weight'" in text
    assert "ranks 514-515 write the same shard" in text


@functools.cache
def plan_of(tp: int, pp: int, dp: int, sizes: tuple[int, int, int]) -> SavePlan:
    planner = ShardedSavePlanner()
    planner.set_up_planner(rank_of(tp, pp, dp, sizes), None, is_coordinator=tp + pp + dp == 0)
    return planner.create_local_plan()


def plans_of_ranks(sizes: tuple[int, int, int]) -> list[SavePlan]:
    tp_size, pp_size, dp_size = sizes
    return [
        plan_of(tp, pp, min(dp, 1), sizes)
        for pp in range(pp_size)
        for dp in range(dp_size)
        for tp in range(tp_size)
    ]


def test_plans_of_2048_ranks_and_one_load_at_another_size() -> None:
    sizes = (8, 16, 16)
    plans, half = plans_of_ranks(sizes), plans_of_ranks((8, 8, 16))
    assert (len(plans), len(half)) == (2048, 1024)
    first = ShardedSavePlanner()
    first.set_up_planner(rank_of(0, 0, 0, sizes), None, is_coordinator=True)
    calls, calls_of_half = (
        calls_in(lambda some=some: first.create_global_plan(some)) for some in (plans, half)
    )
    assert calls < 2.5 * calls_of_half
    global_plans, metadata = first.create_global_plan(plans)
    assert sum(len(plan.items) for plan in global_plans) == 16 * 5 * (8 + 1)
    assert all(plan.planner_data is None for plan in global_plans)
    assert metadata.state_dict_metadata["layers.weight"].size == (80, 32, 8)
    target = ShardedTensor.from_rank_offsets(
        "layers.weight", torch.zeros(8, 8), (0, 7, 80), (1, 1, 4), prepend_axis_num=1
    )
    loader = ShardedLoadPlanner()
    loader.set_up_planner({"w": target}, metadata, is_coordinator=False)
    items = loader.create_local_plan().items
    assert sorted(tuple(item.storage_index.offset) for item in items) == [(7, 8, 0), (7, 12, 0)]
    assert {tuple(item.lengths) for item in items} == {(1, 4, 8)}
    plans[513] = plans[512]
    with pytest.raises(CheckpointingException, match=r"'layers\.weight': ranks 512-513 write"):
        first.create_global_plan(plans)


def replicated_norm(kind: str) -> str | None:
    from torch import distributed as dist

    rank = dist.get_rank()
    replica = {"good": rank, "two": 0, "none": rank + 1}.get(kind, rank)
    shards: dict[str, Any] = {
        "norm": ShardedTensor.from_rank_offsets("norm", torch.ones(12), replica_id=replica),
        "state": ShardedObject("state", b"", (2,), (rank,)),
    }
    if kind == "raises" and rank == 1:
        shards = []  # type: ignore[assignment]
    if kind == "empty" and rank == 1:
        shards = {"state": shards["state"]}
    try:
        validate_sharding_integrity(shards)
    except CheckpointingException as error:
        return str(error)
    return None


def all_kinds() -> dict[str, str | None]:
    return {kind: replicated_norm(kind) for kind in ("good", "two", "none", "raises", "empty")}


def test_all_ranks_get_the_same_verdict() -> None:
    first, second = run_ranks(all_kinds, 2)
    assert first == second
    assert first["good"] is None
    assert first["empty"] is None
    assert "'norm'" in str(first["two"])
    assert "ranks 0-1 write the same shard" in str(first["two"])
    assert "'norm'" in str(first["none"])
    assert "have 0 elements and the global shape (12,) has 12" in str(first["none"])
    assert "rank 1: a state dict must be a dict, got list" in str(first["raises"])


def test_at_most_20_problems_are_listed() -> None:
    half = {
        f"k{index:03d}": ShardedTensor.from_rank_offsets(f"k{index:03d}", torch.ones(2), (0, 0, 2))
        for index in range(50)
    }
    with pytest.raises(CheckpointingException) as caught:
        validate_sharding_integrity(half)
    lines = str(caught.value).splitlines()
    assert "50 problems" in lines[0]
    assert len(lines) == 22
    assert "'k000'" in lines[1]
    assert lines[-1].endswith("and 30 more")
