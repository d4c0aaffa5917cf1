"""Thousands of ranks played by one process: who is in which group, who holds what, what is sent."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mcore.parallel import (
    FSDPDistributedIndex,
    ProcessGroups,
    check_param_hashes_across_dp_replicas,
    cp_zigzag_index,
    get_mesh_names,
    get_pg_rank,
    get_pg_size,
    get_pg_src_rank,
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
    reduce_step_stats,
    resolve_submesh,
)
from mcore.parallel.checkpoint import (
    ShardedLoadPlanner,
    ShardedSavePlanner,
    ShardedTensor,
    describe_shards,
    validate_plans,
)
from mcore.parallel.rng.shared import rng_stream_seeds

WORLDS = (4096, 8192)
SIZES = {"tp": 4, "cp": 2, "pp": 8, "ep": 16, "expt_tp": 2}
# The axes along which the members of a group differ, in the dense and in the expert view.
DENSE = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "mp": "tp pp",
    "tp_cp": "tp cp",
    "dp_cp": "dp cp",
    "tp_dp_cp": "tp dp cp",
    "intra_dp_cp": "dp cp",
}
EXPERT = {
    "ep": "ep",
    "expt_tp": "expt_tp",
    "expt_dp": "expt_dp",
    "tp_ep": "expt_tp ep",
    "tp_ep_pp": "expt_tp ep pp",
    "intra_expt_dp": "expt_dp",
}


def expected_lists(world: int) -> dict[str, dict[int, list[int]]]:
    """The group of every rank by its coordinates: ranks are equal in all axes but the group's."""
    tp, cp, pp, ep, expt_tp = SIZES.values()
    dense = {"tp": tp, "cp": cp, "dp": world // (tp * cp * pp), "pp": pp}
    expert = {"expt_tp": expt_tp, "ep": ep, "expt_dp": world // (expt_tp * ep * pp), "pp": pp}
    found: dict[str, dict[int, list[int]]] = {}
    for fields, sizes in ((DENSE, dense), (EXPERT, expert)):
        for field, axes in fields.items():
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank in range(world):
                rest, key = rank, []
                for axis, size in sizes.items():  # the first axis is the fastest
                    key += [] if axis in axes.split() else [rest % size]
                    rest //= size
                groups.setdefault(tuple(key), []).append(rank)
            found[field] = {rank: ranks for ranks in groups.values() for rank in ranks}
    for field, ends in (("embd", (0, -1)), ("pos_embd", (0,))):
        for pipeline in found["pp"].values():
            ranks = [pipeline[end] for end in ends]
            found.setdefault(field, {}).update(dict.fromkeys(ranks, ranks))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_field_partitions_the_ranks_and_three_ranks_have_those_groups(
    fake_world, world: int
) -> None:
    expected = expected_lists(world)
    for field in (*DENSE, *EXPERT):
        groups = {tuple(ranks) for ranks in expected[field].values()}
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(world)), field
    for rank in (0, world // 2 + 3, world - 1):
        fake_world(rank, world)
        groups_of_rank = ProcessGroups.from_sizes(**SIZES)
        for field, lists in expected.items():
            if rank in lists:
                assert groups_of_rank.ranks(field) == lists[rank], field
                assert groups_of_rank.rank(field) == lists[rank].index(rank)
            else:
                assert getattr(groups_of_rank, field) is None
        sizes = {field: groups_of_rank.size(field) for field in expected}
        assert sizes["dp"] * sizes["tp_cp"] * sizes["pp"] == world
        assert sizes["expt_dp"] * sizes["tp_ep_pp"] == world


# The FSDP index


def index_of(world: int, *, unflattened: bool) -> tuple[FSDPDistributedIndex, DeviceMesh]:
    names, sizes = ("dp_outer", "dp", "cp", "tp"), (4, world // 64, 2, 8)
    if unflattened:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
        mesh = mesh._unflatten(0, sizes, names)
    else:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh["dp", "cp"]._flatten("dp_cp")
    group = mesh["dp_outer", "dp", "cp"]._flatten("hybrid").get_group()
    return FSDPDistributedIndex(mesh, "dp_cp", "dp_outer", "tp", group, True), mesh


@pytest.mark.parametrize("unflattened", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_groups_and_submeshes_of_the_index(fake_world, world: int, unflattened: bool) -> None:
    inner = world // 32
    for rank in (0, world // 2 + 13, world - 1):
        fake_world(rank, world)
        index, mesh = index_of(world, unflattened=unflattened)
        outer, column, tp = rank // (world // 4), rank // 8 % inner, rank % 8
        shards = [outer * (world // 4) + 8 * other + tp for other in range(inner)]
        assert ranks_of(index.get_fsdp_group()) == shards
        assert ranks_of(index.get_outer_fsdp_group()) == list(
            range(rank % (world // 4), world, world // 4)
        )
        assert ranks_of(index.get_dp_group()) == list(range(tp, world, 8))
        assert index.get_submesh("tp").mesh.tolist() == list(range(rank - tp, rank - tp + 8))
        assert index.get_submesh(("dp_outer", "dp_cp", "tp")).shape == (4, inner, 8)
        assert index.get_submesh(("dp_outer", "dp_cp")).mesh[outer].tolist() == shards
        assert index.get_logical_hybrid_fsdp_rank() == column * 4 + outer
        assert get_mesh_names(mesh) == ["dp_outer", "dp", "cp", "tp", "dp_cp", "hybrid"]


@pytest.mark.parametrize("world", WORLDS)
def test_logical_ranks_are_a_permutation(fake_world, world: int) -> None:
    """The places of all ranks by arithmetic, and of eight of them by the index."""
    inner = world // 4
    pairs = itertools.product(range(4), range(inner))
    place = {outer * inner + shard: shard * 4 + outer for outer, shard in pairs}
    assert sorted(place.values()) == list(range(world))
    for rank in range(5, world, world // 8):
        fake_world(rank, world)
        mesh = init_device_mesh("cpu", (4, inner), mesh_dim_names=("dp_outer", "dp_shard"))
        index = FSDPDistributedIndex(
            mesh, "dp_shard", "dp_outer", None, mesh._flatten("all"), hsdp_outer_dp_shard=True
        )
        assert index.get_logical_hybrid_fsdp_rank() == place[rank]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group)


# Group questions


@pytest.mark.parametrize("world", WORLDS)
def test_questions_to_groups(fake_world, world: int) -> None:
    fake_world(world - 2, world)
    odd, even = dist.new_group(range(1, world, 2)), dist.new_group(range(0, world, 2))
    assert (get_pg_size(even), get_pg_rank(even), get_pg_src_rank(even)) == (
        world // 2,
        world // 2 - 1,
        0,
    )
    for ask in (get_pg_size, get_pg_rank, get_pg_src_rank):
        with pytest.raises(ValueError, match=f"rank {world - 2} is not a member"):
            ask(odd)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    assert get_pg_src_rank(resolve_submesh(mesh, "tp")) == world - 2


# Random streams


def test_seeds_of_every_rank_follow_the_formula_and_meet_only_where_it_says() -> None:
    seed = 1234
    model_seeds, expert_seeds, refused = set(), set(), []
    for tp, ep, etp in itertools.product(range(8), range(64), range(8)):
        model, expert = seed + 2718 + tp, seed + 1024 + 100 * ep + etp
        model_seeds.add(model)
        expert_seeds.add(expert)
        if model == expert:
            refused.append((tp, ep, etp))
            with pytest.raises(ValueError, match=f"tp_rank={tp}, ep_rank={ep}, etp_rank={etp}"):
                rng_stream_seeds(seed, tp, ep, etp)
        else:
            assert list(rng_stream_seeds(seed, tp, ep, etp).values()) == [seed, model, expert]
    assert (len(model_seeds), len(expert_seeds)) == (8, 64 * 8)  # one stream for each coordinate
    assert refused == [(6, 17, 0), (7, 17, 1)]
    assert model_seeds & expert_seeds == {seed + 2724, seed + 2725}


# Context-parallel slices


def test_every_position_is_on_one_rank_and_causal_work_is_equal() -> None:
    cp_size = WORLDS[0]
    length = 4 * cp_size
    parts = torch.stack([cp_zigzag_index(length, cp_size, rank) for rank in range(cp_size)])
    assert torch.equal(parts.flatten().sort().values, torch.arange(length))
    work = (parts + 1).sum(dim=1)  # a query at position p attends to p + 1 keys
    assert work.unique().numel() == 1


# Checkpoints

ROWS = 5000


def entries(ranks: int, rank: int, device: str = "meta") -> dict[str, ShardedTensor]:
    """Rows cut as torch.chunk does, with nothing for the last ranks, and a replicated tensor."""
    chunk = -(-ROWS // ranks)
    start = min(rank * chunk, ROWS)
    size = min(chunk, ROWS - start)
    rows = ShardedTensor(
        key="rows",
        data=torch.empty(size, 4, device=device),
        dtype=torch.float32,
        local_shape=(size, 4),
        global_shape=(ROWS, 4),
        global_offset=(start, 0),
        axis_fragmentations=None,
    )
    norm = torch.empty(4, device=device)
    return {
        "rows": rows,
        "norm": ShardedTensor.from_rank_offsets("norm", norm, replica_id=rank),
    }


def test_parts_of_all_ranks_are_whole_and_wrong_ones_are_named() -> None:
    world = WORLDS[0]
    ranks = [describe_shards(entries(world, rank)) for rank in range(world)]
    assert validate_plans(ranks) == []
    last = -(-ROWS // -(-ROWS // world)) - 1  # the last rank with rows
    hole = [*ranks[:last], *ranks[last + 1 :]]
    [problem] = validate_plans(hole)
    assert "'rows'" in problem
    assert "some shard is on no rank" in problem
    [problem] = validate_plans([*ranks, ranks[7]])
    assert f"ranks 7, {world} write the same shard" in problem
    shifted = next(record for record in ranks[8] if record.key == "rows")
    start = shifted.global_offset[0] - 1
    wide = shifted._replace(global_offset=(start, 0), shard_shape=(shifted.shard_shape[0] + 1, 4))
    problems = validate_plans([*ranks[:8], [wide, *ranks[8][1:]], *ranks[9:]])
    assert any("rank 7" in text and "rank 8" in text and "overlap" in text for text in problems)


def test_plans_of_all_ranks_cover_and_load_in_another_number_of_ranks() -> None:
    world, plans = WORLDS[0], []
    for rank in range(world):
        planner = ShardedSavePlanner()
        planner.set_up_planner(entries(world, rank), None, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
        if rank == 0:
            coordinator = planner
    plans, metadata = coordinator.create_global_plan(plans)
    saved_chunk, readers = -(-ROWS // world), 1000
    writers = Counter(item.index.fqn for plan in plans for item in plan.items)
    assert writers == {"rows": ROWS // saved_chunk, "norm": 1}
    for reader in (0, 499, readers - 1):
        loader = ShardedLoadPlanner()
        loader.set_up_planner(entries(readers, reader, "cpu"), metadata, is_coordinator=False)
        items = loader.create_local_plan().items
        rows = [item for item in items if item.storage_index.fqn == "rows"]
        read = [
            item.storage_index.offset[0] + item.storage_offsets[0] + row
            for item in rows
            for row in range(item.lengths[0])
        ]
        assert sorted(read) == list(range(reader * 5, reader * 5 + 5))
        assert len(items) - len(rows) == 1


# Messages


def messages(world: int, fake_world: Callable[[int, int], None], watch: Any) -> dict[str, int]:
    """Bytes that each function hands to collectives, the received ones included."""
    fake_world(world // 2, world)
    group = dist.group.WORLD
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    report = {f"key {number}": number for number in range(12)}
    calls: dict[str, Callable[[], Any]] = {
        "stat": lambda: reduce_max_stat_across_model_parallel_group(1.0, group),
        "and": lambda: logical_and_across_model_parallel_group(True, group),
        "memory": lambda: reduce_max_memory_across_pp_group(report, group),
        "step stats": lambda: reduce_step_stats(dict(report), {"ok": True}, group),
        "hashes": lambda: check_param_hashes_across_dp_replicas(model, dp_group=group),
        "cross hashes": lambda: check_param_hashes_across_dp_replicas(model, True, dp_group=group),
    }
    found = {}
    for name, call in calls.items():
        watch.clear()
        call()
        found[name] = sum(watch)
    return found


COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "all_to_all"),
    *("all_gather_into_tensor", "all_gather_single", "all_to_all_single"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


@pytest.fixture
def bytes_sent(monkeypatch) -> list[int]:
    """Collects the bytes of the tensors in every call of a collective; pickled ones are refused."""
    sent: list[int] = []

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        return sum(map(size, value)) if isinstance(value, list | tuple) else 0

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert "object" not in name
            sent.append(sum(map(size, [*args, *kwargs.values()])))
            return collective(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, watched(name, getattr(dist, name)))
    return sent


def test_no_message_grows_with_the_world(fake_world, bytes_sent) -> None:
    small = messages(8, fake_world, bytes_sent)
    assert min(small.values()) > 0
    assert small["stat"] == small["memory"] == 512
    for world in WORLDS:
        assert messages(world, fake_world, bytes_sent) == small


def test_the_watch_sees_what_grows(fake_world, bytes_sent) -> None:
    fake_world(0, 64)
    dist.all_gather([torch.empty(2) for _ in range(64)], torch.empty(2))
    assert bytes_sent == [65 * 8]
