"""Rank arithmetic against coordinates counted by hand and by brute force."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel import ProcessGroups
from mcore.parallel.process_groups.layout import (
    DENSE_FIELDS,
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    GROUP_FIELDS,
    Layout,
    ParallelSizes,
    embedding_lists,
    hierarchical_lists,
    layouts_of_sizes,
)

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SMALL = st.integers(1, 4)


def brute_force(sizes: dict[str, int], along: tuple[str, ...]) -> list[list[int]]:
    """Group ranks whose coordinates agree on all other axes; the first axis is the fastest."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for reversed_coordinate in product(*(range(size) for size in reversed(sizes.values()))):
        coordinate = dict(zip(sizes, reversed(reversed_coordinate), strict=True))
        rank, stride = 0, 1
        for axis, size in sizes.items():
            rank += coordinate[axis] * stride
            stride *= size
        key = tuple(value for axis, value in coordinate.items() if axis not in along)
        groups.setdefault(key, []).append(rank)
    return sorted(sorted(group) for group in groups.values())


def is_partition(lists: list[list[int]], world: int, size: int) -> bool:
    everyone = sorted(rank for ranks in lists for rank in ranks)
    ascending = all(ranks == sorted(ranks) for ranks in lists)
    return everyone == list(range(world)) and {len(r) for r in lists} == {size} and ascending


@settings(max_examples=60, deadline=None)
@given(tp=SMALL, cp=SMALL, pp=SMALL, dp=SMALL, order=st.permutations(["tp", "cp", "dp", "pp"]))
def test_dense_groups_partition_the_world_in_any_order(
    tp: int, cp: int, pp: int, dp: int, order: list[str]
) -> None:
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    layout = Layout.row_major({axis: sizes[axis] for axis in reversed(order)})
    for axes in DENSE_FIELDS.values():
        lists = layout.lists(axes)
        assert is_partition(lists, tp * cp * pp * dp, prod(sizes[axis] for axis in axes))
        assert sorted(lists) == brute_force({axis: sizes[axis] for axis in order}, axes)


@settings(max_examples=60, deadline=None)
@given(tp=SMALL, cp=SMALL, pp=SMALL, dp=SMALL)
def test_layout_of_sizes_is_the_default_order(tp: int, cp: int, pp: int, dp: int) -> None:
    dense, _ = layouts_of_sizes(ParallelSizes(tp, cp, pp, 1, tp), tp * cp * pp * dp, DEFAULT_ORDER)
    for axes in DENSE_FIELDS.values():
        assert sorted(dense.lists(axes)) == brute_force(
            {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, axes
        )


@settings(max_examples=60, deadline=None)
@given(expt_tp=SMALL, ep=SMALL, pp=SMALL, expt_dp=SMALL)
def test_expert_groups_partition_the_world(expt_tp: int, ep: int, pp: int, expt_dp: int) -> None:
    world = expt_tp * ep * pp * expt_dp
    _, expert = layouts_of_sizes(ParallelSizes(1, 1, pp, ep, expt_tp), world, DEFAULT_ORDER)
    sizes = {"expt_tp": expt_tp, "ep": ep, "expt_dp": expt_dp, "pp": pp}
    for axes in EXPERT_FIELDS.values():
        lists = expert.lists(axes)
        assert is_partition(lists, world, prod(sizes[axis] for axis in axes))
        assert sorted(lists) == brute_force(sizes, axes)


def test_every_group_of_eight_thousand_ranks() -> None:
    world = 8192
    dense, expert = layouts_of_sizes(ParallelSizes(8, 2, 16, 64, 2), world, DEFAULT_ORDER)
    sizes = {"tp": 8, "cp": 2, "dp": 32, "pp": 16, "expt_tp": 2, "ep": 64, "expt_dp": 4}
    for layout, table in ((dense, DENSE_FIELDS), (expert, EXPERT_FIELDS)):
        for axes in table.values():
            size = prod(sizes[axis] for axis in axes)
            assert is_partition(layout.lists(axes), world, size)


def test_groups_are_created_in_the_order_of_the_fields() -> None:
    names = [field.name for field in fields(ProcessGroups)]
    absent = {"inter_dist_opt", "dense_mesh", "expert_mesh"}
    assert list(GROUP_FIELDS) == [name for name in names if name not in absent]
    assert {*DENSE_FIELDS, *EXPERT_FIELDS, *EMBEDDING_FIELDS, "hcp"} == set(GROUP_FIELDS)


@settings(max_examples=40, deadline=None)
@given(factors=st.lists(SMALL, min_size=1, max_size=4), stride=st.integers(1, 3))
def test_hierarchical_levels_rebuild_every_context_parallel_group(
    factors: list[int], stride: int
) -> None:
    cp = prod(factors)
    cp_lists = [[start + stride * i for i in range(cp)] for start in range(stride)]
    levels = hierarchical_lists(cp_lists, factors)
    assert [len(level[0]) for level in levels] == factors
    for level in levels:
        assert is_partition(level, cp * stride, len(level[0]))
    for ranks in cp_lists:  # walking the levels from the first rank reaches the whole group
        reached = {ranks[0]}
        for level in levels:
            reached = {rank for group in level if reached & set(group) for rank in group}
        assert sorted(reached) == ranks


def test_hierarchy_of_sixteen_by_hand() -> None:
    levels = hierarchical_lists([list(range(100, 116))], [2, 2, 4])
    assert [level[0] for level in levels] == [[100, 101], [100, 102], [100, 104, 108, 112]]
    assert levels[1][3] == [105, 107]


@pytest.mark.parametrize(
    ("factors", "text"), [([2, 2], r"\[2, 2\] is 4, but cp is 8"), ([8, 0], "at least 1, got 0")]
)
def test_hierarchy_refuses_wrong_factors(factors: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hierarchical_lists([list(range(8))], factors)


def test_pp_first_order_by_hand() -> None:
    dense, expert = layouts_of_sizes(ParallelSizes(2, 1, 2, 1, 2), 8, "pp-tp-dp")
    assert dense.axes[-3:] == ("dp", "tp", "pp")
    assert dense.lists(["pp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dense.lists(["tp"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert expert.lists(["pp"]) == dense.lists(["pp"])


def test_layout_of_a_permuted_mesh_lists_ascending_ranks() -> None:
    layout = Layout(("dp", "tp"), torch.tensor([[3, 1], [2, 0]]))
    assert layout.lists(["tp"]) == [[1, 3], [0, 2]]
    assert layout.lists(["cp"]) == [[3], [1], [2], [0]]


def test_embedding_choice_drops_repeats_and_empty_pipelines() -> None:
    lists = embedding_lists([[0, 1], [2, 3]], lambda r: [r[1], r[1]] if r[0] == 2 else [], "embd")
    assert lists == [[3]]


def test_embedding_choice_must_stay_in_its_pipeline() -> None:
    with pytest.raises(ValueError, match=r"pos_embd has ranks \[2\].*pipeline \[0, 1\]"):
        embedding_lists([[0, 1], [2, 3]], lambda ranks: [2], "pos_embd")


@pytest.mark.parametrize(
    ("sizes", "world", "order", "text"),
    [
        ((3, 1, 1, 1, 3), 8, DEFAULT_ORDER, r"world size 8 .* 3 \* 1 \* 1 = 3"),
        ((2, 1, 2, 3, 1), 8, DEFAULT_ORDER, r"world size 8 .* 1 \* 3 \* 2 = 6"),
        ((2, 1, 1, 1, 2), 8, "tp-xp-dp", "unknown token 'xp'"),
        ((2, 1, 1, 1, 2), 8, "tp-dp-tp", "names an axis twice"),
        ((2, 2, 1, 1, 2), 8, "tp-dp-pp", "lacks 'cp', whose size is 2"),
        ((2, 1, 1, 1, 2), 8, "tp-cp-ep-pp", "lacks 'dp', whose size is 4"),
        ((8, 1, 1, 1, 2), 8, "tp", "lacks 'dp', whose size is 4"),
        ((1, 1, 1, 1, 2), 8, "dp", "lacks 'tp', whose size is 2"),
        ((2, 2, 2, 1, 2), 8, "cp-pp-tp-dp", r"pp groups .* \[0, 2\] and \[0, 1\]"),
        ((2, 1, 1, 1, 2), 8, "", "unknown token ''"),
    ],
)
def test_impossible_layouts_are_refused_with_the_numbers(
    sizes: tuple[int, ...], world: int, order: str, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        layouts_of_sizes(ParallelSizes(*sizes), world, order)


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "ep", "expt_tp"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "expt_tp": 1}
    with pytest.raises(ValueError, match=rf"{name} must be at least 1, got 0"):
        ParallelSizes(**sizes | {name: 0})
    for wrong in (2.0, True, "2"):
        with pytest.raises(TypeError, match=rf"{name} must be an int"):
            ParallelSizes(**sizes | {name: wrong})  # type: ignore[dict-item]
