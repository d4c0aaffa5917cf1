"""Dimension names of meshes: what is listed, what torch takes, and submeshes in any order."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mcore.parallel import contains_submesh, get_mesh_names, resolve_submesh
from rank_testing import run_ranks

NAMES = ("dp_outer", "dp_shard", "tp")


def root_of_eight() -> DeviceMesh:
    """The mesh ``[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]`` with ``hsdp`` over its first two dims."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    mesh["dp_outer", "dp_shard"]._flatten("hsdp")
    return mesh


def unflattened_of_eight() -> tuple[DeviceMesh, DeviceMesh]:
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2, 2), NAMES)
    dense["dp_outer", "dp_shard"]._flatten("hs")
    return world, dense


def groups_of(mesh: DeviceMesh) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


def test_names_of_nothing() -> None:
    assert get_mesh_names() == []
    assert get_mesh_names(None, only_submesh_dims=True) == []
    assert contains_submesh(None, "tp") is False


def test_dimensions_come_first_then_flattened_ones_in_order_of_creation(fake_world) -> None:
    fake_world(5, 8)
    mesh = root_of_eight()
    mesh["dp_shard", "tp"]._flatten("a_later_one")
    assert get_mesh_names(mesh) == [*NAMES, "hsdp", "a_later_one"]
    assert get_mesh_names(mesh, only_submesh_dims=True) == list(NAMES)


def test_a_mesh_without_names_lists_none(fake_world) -> None:
    fake_world(5, 8)
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4))
    assert get_mesh_names(mesh) == []
    assert contains_submesh(mesh, "tp") is False
    with pytest.raises(ValueError, match=r"no dimension 'tp'\. It has: no names"):
        resolve_submesh(mesh, "tp")


def test_flattened_names_are_listed_only_where_their_ranks_are(fake_world) -> None:
    fake_world(5, 8)
    root = root_of_eight()
    assert get_mesh_names(root["tp"]) == ["tp"]
    assert get_mesh_names(root["dp_shard"]) == ["dp_shard"]
    assert get_mesh_names(root["dp_outer", "dp_shard"]) == ["dp_outer", "dp_shard", "hsdp"]
    world, dense = unflattened_of_eight()
    assert get_mesh_names(world) == ["world", "hs"]
    assert get_mesh_names(dense) == [*NAMES, "hs"]
    assert get_mesh_names(dense["dp_outer", "dp_shard"]) == ["dp_outer", "dp_shard", "hs"]
    assert get_mesh_names(dense["tp"]) == ["tp"]
    assert get_mesh_names(dense["dp_shard"]) == ["dp_shard"]


def test_a_dimension_that_is_named_like_a_flattened_one_is_listed_once(fake_world) -> None:
    fake_world(5, 8)
    world, _ = unflattened_of_eight()
    other = world._unflatten(0, (4, 2), ("hs", "rest"))
    assert get_mesh_names(other) == ["hs", "rest"]
    assert dist.get_process_group_ranks(resolve_submesh(other, "hs").get_group()) == [1, 3, 5, 7]
    reverse = world._unflatten(0, (2, 4), ("rest", "hs"))
    assert groups_of(resolve_submesh(reverse, "hs")) == [[4, 5, 6, 7]]
    assert groups_of(resolve_submesh(reverse, ("hs", "rest"))) == [[4, 5, 6, 7], [1, 5]]


@pytest.mark.parametrize(
    ("names", "on_root", "on_unflattened"),
    [
        ("tp", True, True),
        (["tp"], True, True),
        (("dp_outer", "tp"), True, True),
        (NAMES, True, True),
        (("tp", "dp_outer"), False, False),
        (("dp_shard", "dp_outer"), False, False),
        ("hs", True, False),
        (("hs", "tp"), True, False),
        (("hs", "dp_shard"), False, False),
        ("other", False, False),
        ((), False, False),
        (None, False, False),
        (("tp", None), False, False),
    ],
    ids=str,
)
def test_contains_says_what_torch_does(fake_world, names, on_root, on_unflattened) -> None:
    fake_world(5, 8)
    _, dense = unflattened_of_eight()
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    root["dp_outer", "dp_shard"]._flatten("hs")
    for mesh, expected in ((root, on_root), (dense, on_unflattened)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert contains_submesh(mesh, names) is expected
        if names and names != ("tp", None):
            assert torch_slices(mesh, names) is expected


def torch_slices(mesh: DeviceMesh, names) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mesh[names if isinstance(names, str) else tuple(names)]
        except (KeyError, RuntimeError):
            return False
    return True


def test_asking_creates_no_group_and_changes_no_mesh(fake_world) -> None:
    fake_world(5, 8)
    _, dense = unflattened_of_eight()
    before = dist.distributed_c10d._world.group_count
    names = get_mesh_names(dense)
    for query in ("tp", "hs", ("tp", "hs"), ("tp", "dp_outer")):
        contains_submesh(dense, query)
        resolve_submesh(dense, query)
    assert get_mesh_names(dense) == names
    assert dense.mesh_dim_names == NAMES
    assert dist.distributed_c10d._world.group_count == before


@pytest.mark.parametrize(
    ("names", "ranks", "groups"),
    [
        ("tp", [4, 5], [[4, 5]]),
        (("dp_outer", "tp"), [[0, 1], [4, 5]], [[1, 5], [4, 5]]),
        (("tp", "dp_outer"), [[0, 4], [1, 5]], [[4, 5], [1, 5]]),
        (("dp_shard", "dp_outer"), [[1, 5], [3, 7]], [[5, 7], [1, 5]]),
        ("hs", [1, 3, 5, 7], [[1, 3, 5, 7]]),
        (("hs", "tp"), [[0, 1], [2, 3], [4, 5], [6, 7]], [[1, 3, 5, 7], [4, 5]]),
        (("tp", "hs"), [[0, 2, 4, 6], [1, 3, 5, 7]], [[4, 5], [1, 3, 5, 7]]),
    ],
    ids=str,
)
def test_submeshes_of_an_unflattened_mesh(fake_world, names, ranks, groups) -> None:
    fake_world(5, 8)
    _, dense = unflattened_of_eight()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        submesh = resolve_submesh(dense, names)
    assert submesh.mesh_dim_names == ((names,) if isinstance(names, str) else names)
    assert submesh.mesh.tolist() == ranks
    assert groups_of(submesh) == groups


def test_flattened_dimension_of_a_root_mesh_comes_without_the_warning_of_torch(fake_world) -> None:
    fake_world(5, 8)
    root = root_of_eight()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert groups_of(resolve_submesh(root, ("hsdp", "tp"))) == [[1, 3, 5, 7], [4, 5]]


def test_what_torch_slices_is_what_comes_back(fake_world) -> None:
    fake_world(5, 8)
    root = root_of_eight()
    assert resolve_submesh(root, NAMES) is root
    assert resolve_submesh(root, ["dp_shard", "tp"]) == root["dp_shard", "tp"]
    flat = root["dp_outer", "dp_shard"]._flatten("hsdp")
    assert resolve_submesh(root, "hsdp") is flat
    assert resolve_submesh(root["dp_outer", "dp_shard"], "hsdp") is flat


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("other", "no dimension 'other'. It has: dp_outer, dp_shard, tp, hsdp"),
        (("tp", None), "no dimension None"),
        ((), "no dimension names"),
        (None, "no dimension names"),
        (("tp", "tp"), "'tp' appears twice"),
        (("hsdp", "dp_shard"), "cannot take the submesh .*overlapping"),
    ],
    ids=str,
)
def test_impossible_submeshes(fake_world, names, text: str) -> None:
    fake_world(5, 8)
    with pytest.raises(ValueError, match=text):
        resolve_submesh(root_of_eight(), names)


def test_a_flattened_dimension_of_other_ranks_is_not_handed_out(fake_world) -> None:
    fake_world(5, 8)
    tp = root_of_eight()["tp"]
    assert dist.get_process_group_ranks(tp.get_group("hsdp")) == [1, 3, 5, 7]  # torch hands it out
    with pytest.raises(ValueError, match=r"no dimension 'hsdp'\. It has: tp"):
        resolve_submesh(tp, "hsdp")


def test_a_name_of_two_dimensions_is_refused(fake_world) -> None:
    fake_world(5, 8)
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    with pytest.raises(ValueError, match="'x' appears twice"):
        resolve_submesh(world._unflatten(0, (4, 2), ("x", "x")), "x")


def test_a_rank_outside_the_mesh(fake_world) -> None:
    fake_world(5, 8)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert get_mesh_names(mesh) == ["dp", "tp"]
    assert contains_submesh(mesh, "tp") is False  # torch cannot slice it here
    with pytest.raises(ValueError, match="this rank is not in DeviceMesh"):
        resolve_submesh(mesh, ("tp", "dp"))


def test_a_torch_that_cannot_join_meshes(fake_world, monkeypatch) -> None:
    fake_world(5, 8)
    mesh = root_of_eight()
    monkeypatch.delattr(DeviceMesh, "_concatenate")
    assert groups_of(resolve_submesh(mesh, ("dp_outer", "tp"))) == [[1, 5], [4, 5]]
    with pytest.raises(ValueError, match="this version of torch cannot join meshes"):
        resolve_submesh(mesh, ("tp", "dp_outer"))


@st.composite
def shapes_and_queries(draw) -> tuple[list[int], list[int], int]:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    count = draw(st.integers(1, len(shape)))
    rank = draw(st.integers(0, math.prod(shape) - 1))
    return shape, list(order[:count]), rank


@settings(max_examples=40, deadline=None)
@given(shapes_and_queries())
def test_any_dimensions_in_any_order_are_the_ranks_that_arithmetic_gives(drawn) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape, query, rank = drawn
    world = math.prod(shape)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple("abcd"[: len(shape)]))
        submesh = resolve_submesh(mesh, ["abcd"[dim] for dim in query])
        ranks = torch.arange(world).reshape(shape)
        place = (ranks == rank).nonzero()[0].tolist()
        for dim in range(len(shape)):
            if dim not in query:
                ranks = ranks.narrow(dim, place[dim], 1)
        left = [dim for dim in range(len(shape)) if dim not in query]
        expected = ranks.permute(query + left).reshape([shape[dim] for dim in query])
        assert submesh.mesh.tolist() == expected.tolist()
        for index, dim in enumerate(query):
            selection = [
                slice(None) if other == dim else place[other] for other in range(len(shape))
            ]
            line = torch.arange(world).reshape(shape)[tuple(selection)].tolist()
            assert dist.get_process_group_ranks(submesh.get_group(index)) == line
    finally:
        dist.destroy_process_group()


def sums_over_submeshes() -> dict[str, float]:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2), ("dp", "tp"))
    dense["dp", "tp"]._flatten("all")
    found = {}
    for names in (("tp", "dp"), ("dp", "tp"), ("all",)):
        submesh = resolve_submesh(dense, names)
        for index, name in enumerate(names):
            total = torch.tensor(2.0 ** dist.get_rank())
            dist.all_reduce(total, group=submesh.get_group(index))
            found[f"{name} of {names}"] = total.item()
    return found


def test_groups_of_submeshes_reduce_over_their_ranks_on_real_ranks() -> None:
    for rank, found in enumerate(run_ranks(sums_over_submeshes, 4)):
        tp = 2.0**rank + 2.0 ** (rank ^ 1)
        dp = 2.0**rank + 2.0 ** (rank ^ 2)
        assert found == {
            "tp of ('tp', 'dp')": tp,
            "dp of ('tp', 'dp')": dp,
            "dp of ('dp', 'tp')": dp,
            "tp of ('dp', 'tp')": tp,
            "all of ('all',)": 15.0,
        }
