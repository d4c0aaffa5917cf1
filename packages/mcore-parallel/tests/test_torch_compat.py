"""The adapter to torch: values on real ranks, under new and old names."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mcore.parallel.torch_compat import (
    all_gather_single,
    can_order_ranks,
    flatten_mesh,
    flattened_meshes,
    is_distributed,
    join_meshes,
    reduce_scatter_single,
    root_mesh,
)
from rank_testing import run_ranks


def test_is_distributed_follows_the_world(fake_world) -> None:
    assert not is_distributed()
    fake_world(0, 2)
    assert is_distributed()


def test_ranks_can_be_ordered_where_new_group_takes_an_order(fake_world) -> None:
    fake_world(0, 2)
    if can_order_ranks():
        group = dist.new_group([1, 0], sort_ranks=False)
        assert dist.get_process_group_ranks(group) == [1, 0]
    else:
        with pytest.raises(TypeError, match="sort_ranks"):
            dist.new_group([1, 0], sort_ranks=False)


def collectives() -> dict[str, object]:
    rank = dist.get_rank()
    group = dist.new_group([1, 0])
    found: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered = torch.empty(4, 3)
        found["handle"] = all_gather_single(gathered, torch.full((2, 3), float(rank)), group)
        found["gathered"] = gathered[:, 0].tolist()
        mine = torch.empty(2)
        reduce_scatter_single(mine, torch.arange(4.0) * (rank + 1), group)
        found["scattered"] = mine.tolist()
        work = all_gather_single(gathered, torch.full((2, 3), 5.0 + rank), group, async_op=True)
        work.wait()
        found["async"] = gathered[:, 0].tolist()
    return found


def test_collectives_on_two_ranks_give_hand_computed_values_without_a_warning() -> None:
    both = {"handle": None, "gathered": [0, 0, 1, 1], "async": [5, 5, 6, 6]}
    # arange(4) times 1 plus arange(4) times 2
    assert run_ranks(collectives, 2) == [
        {**both, "scattered": [0, 3]},
        {**both, "scattered": [6, 9]},
    ]


@pytest.mark.parametrize(
    ("call", "new", "old"),
    [
        (all_gather_single, "all_gather_single", "all_gather_into_tensor"),
        (reduce_scatter_single, "reduce_scatter_single", "reduce_scatter_tensor"),
    ],
)
def test_an_older_torch_is_served_by_the_old_name(monkeypatch, call, new, old) -> None:
    used = []

    def record(name):  # type: ignore[no-untyped-def]
        return lambda *args, **kwargs: used.append((name, len(args), sorted(kwargs)))

    monkeypatch.setattr(dist, old, record(old))
    monkeypatch.setattr(dist, new, record(new), raising=False)
    call(torch.empty(1), torch.empty(1), None)
    monkeypatch.delattr(dist, new)
    call(torch.empty(1), torch.empty(1), None)
    options = ["async_op", "group"] if call is all_gather_single else ["group"]
    assert used == [(new, 2, options), (old, 2, options)]


def test_flatten_gives_the_same_mesh_again_and_none_for_a_taken_name(fake_world) -> None:
    fake_world(5, 16)
    mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
    flat = flatten_mesh(mesh[("pp", "tp")], "mp")
    assert flat is not None
    assert dist.get_process_group_ranks(flat.get_group()) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert flatten_mesh(mesh[("pp", "tp")], "mp") is flat
    assert flatten_mesh(mesh[("pp", "dp")], "mp") is None
    assert flatten_mesh(mesh[("pp", "dp")], "tp") is None


def test_flatten_gives_none_where_torch_has_no_flatten(fake_world, monkeypatch) -> None:
    fake_world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    monkeypatch.delattr(dist.device_mesh.DeviceMesh, "_flatten")
    assert flatten_mesh(mesh[("dp", "tp")], "all") is None


def test_flatten_of_a_whole_mesh(fake_world) -> None:
    fake_world(5, 16)
    mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
    flat = flatten_mesh(mesh["dp", "tp"], "stage")
    assert flat is not None
    assert dist.get_process_group_ranks(flat.get_group()) == list(range(8))
    assert flatten_mesh(mesh[("dp", "tp")], "stage") is flat
    assert flatten_mesh(mesh["pp", "dp"], "stage") is None


def test_every_mesh_of_a_family_knows_its_root_and_the_flattened_ones(fake_world) -> None:
    fake_world(5, 8)
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 4), ("dp", "tp"))
    flat = dense["dp", "tp"]._flatten("all")
    for mesh in (world, dense, dense["tp"], flat):
        assert root_mesh(mesh) is world
        assert flattened_meshes(mesh) == {"all": flat}
    found = flattened_meshes(world)
    found.clear()
    assert flattened_meshes(world) == {"all": flat}


def test_a_torch_without_families_of_meshes() -> None:
    mesh = SimpleNamespace()
    assert root_mesh(mesh) is mesh  # type: ignore[comparison-overlap, arg-type]
    assert flattened_meshes(mesh) == {}  # type: ignore[arg-type]


def test_joined_meshes_keep_order_and_groups(fake_world, monkeypatch) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    joined = join_meshes([mesh["c"], mesh["a"]])
    assert joined.mesh_dim_names == ("c", "a")
    assert joined.mesh.tolist() == [[0, 4], [1, 5]]
    assert joined.get_all_groups() == [mesh["c"].get_group(), mesh["a"].get_group()]
    with pytest.raises(RuntimeError, match="overlapping"):
        join_meshes([mesh["a", "b"], mesh["b"]])
    monkeypatch.delattr(dist.device_mesh.DeviceMesh, "_concatenate")
    with pytest.raises(RuntimeError, match="cannot join meshes"):
        join_meshes([mesh["c"], mesh["a"]])
