"""FSDPDistributedIndex: groups and submeshes written down by hand, and everything it refuses."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mcore.parallel import FSDPDistributedIndex, using_tensor_parallel
from mcore.parallel.torch_compat import can_order_ranks
from rank_testing import run_ranks

HYBRID = ("dp_outer", "dp_shard")
NAMES = (*HYBRID, "tp")


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group)


def mesh_of_eight() -> tuple[DeviceMesh, dist.ProcessGroup]:
    """``[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]`` and the hybrid group of its first two dims."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    return mesh, mesh[HYBRID]._flatten("hsdp").get_group()


def hybrid_index(**more: object) -> FSDPDistributedIndex:
    mesh, group = mesh_of_eight()
    return FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", group, **more)  # type: ignore[arg-type]


def test_arguments_have_the_documented_order() -> None:
    parameters = inspect.signature(FSDPDistributedIndex).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *("device_mesh", "dp_shard_dim", "dp_outer_dim", "tp_dim", "hybrid_fsdp_group"),
        *("hsdp_outer_dp_shard", "expt_device_mesh"),
    ]
    assert [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == [
        *("hybrid_fsdp_expt_group", "fsdp_group_ag", "expt_fsdp_group_ag"),
    ]


def test_hybrid_index_of_eight_ranks(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", group)
    assert ranks_of(index.get_fsdp_group()) == [5, 7]
    assert ranks_of(index.get_outer_fsdp_group()) == [1, 5]
    assert ranks_of(index.get_dp_group()) == [1, 3, 5, 7]
    assert index.get_root_mesh() is mesh
    assert index.use_hybrid_fsdp is True
    assert index.get_submesh("tp").mesh.tolist() == [4, 5]
    assert index.get_submesh("dp_shard").mesh.tolist() == [5, 7]
    assert index.get_submesh(["dp_shard", "tp"]).mesh.tolist() == [[4, 5], [6, 7]]
    assert index.get_submesh(HYBRID).mesh.tolist() == [[1, 3], [5, 7]]
    assert index.get_submesh(NAMES) is mesh
    assert index.get_submesh("tp").get_group() is mesh["tp"].get_group()


def test_attributes_are_public(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    second = dist.new_group([5, 7])
    index = FSDPDistributedIndex(
        mesh, "dp_shard", "dp_outer", "tp", group, True, fsdp_group_ag=second
    )
    assert index.device_mesh is mesh
    assert (index.dp_shard_dim, index.dp_outer_dim, index.tp_dim) == ("dp_shard", "dp_outer", "tp")
    assert index.hsdp_outer_dp_shard is True
    assert index.fsdp_group is index.get_fsdp_group()
    assert index.outer_fsdp_group is index.get_outer_fsdp_group()
    assert index.hybrid_fsdp_group is group
    assert index.fsdp_group_ag is second
    assert index.expt_device_mesh is index.expt_fsdp_group is index.expt_outer_fsdp_group is None
    assert index.hybrid_fsdp_expt_group is index.expt_fsdp_group_ag is None
    assert list(index.mesh_library) == [
        ("tp", False),
        (*NAMES, False),
        ("dp_shard", "tp", False),
        (*HYBRID, False),
        ("dp_shard", False),
    ]
    assert index.mesh_library["tp", False] is index.get_submesh("tp")


def test_index_without_outer_and_tensor_parallel_dimension(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    index = FSDPDistributedIndex(mesh, "dp")
    assert index.use_hybrid_fsdp is False
    assert index.get_outer_fsdp_group() is None
    assert index.get_dp_group() is index.get_fsdp_group() is dist.group.WORLD
    assert list(index.mesh_library) == [("dp", False)]
    assert index.get_submesh("dp") is mesh
    unused = dist.new_group([4, 5])
    given = FSDPDistributedIndex(mesh, "dp", hybrid_fsdp_group=unused)
    assert given.hybrid_fsdp_group is unused
    assert given.get_dp_group() is given.get_fsdp_group() is dist.group.WORLD


@pytest.mark.parametrize("rank", range(8))
def test_logical_rank_of_two_by_four(fake_world, rank: int) -> None:
    fake_world(rank, 8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=HYBRID)
    index = FSDPDistributedIndex(
        mesh,
        "dp_shard",
        "dp_outer",
        hybrid_fsdp_group=mesh[HYBRID]._flatten("all"),
        hsdp_outer_dp_shard=True,
    )
    assert index.get_logical_hybrid_fsdp_rank() == [0, 2, 4, 6, 1, 3, 5, 7][rank]


@pytest.mark.parametrize("outer", range(1, 9))
def test_logical_rank_is_a_permutation_with_the_documented_inverse(fake_world, outer: int) -> None:
    for inner in range(1, 9):
        places = []
        for rank in range(outer * inner):
            fake_world(rank, outer * inner)
            mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=HYBRID)
            group = mesh._flatten("hsdp").get_group()
            index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", None, group, True)
            places.append(index.get_logical_hybrid_fsdp_rank())
        assert sorted(places) == list(range(outer * inner))
        for rank, place in enumerate(places):
            assert (place % outer) * inner + place // outer == rank


def test_logical_rank_needs_full_sharding(fake_world) -> None:
    fake_world(5, 8)
    with pytest.raises(AssertionError, match="hsdp_outer_dp_shard=True"):
        hybrid_index().get_logical_hybrid_fsdp_rank()


def test_second_group_for_all_gathers(fake_world) -> None:
    fake_world(5, 8)
    second = dist.new_group([5, 7])
    index = hybrid_index(fsdp_group_ag=second)
    assert index.get_fsdp_group(independent_all_gather=True) is second
    assert index.get_fsdp_group() is not second
    without = hybrid_index()
    assert without.get_fsdp_group(independent_all_gather=True) is None
    assert without.get_fsdp_group(is_expert_parallel=True) is None


def test_a_mesh_may_stand_for_a_group(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    flat = mesh[HYBRID]._flatten("hsdp")
    index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=flat)
    assert index.hybrid_fsdp_group is group


# Meshes of other shapes


@pytest.mark.parametrize("on_root", [True, False])
def test_shards_over_a_flattened_dimension(fake_world, on_root: bool) -> None:
    fake_world(13, 16)
    names = ("dp_outer", "dp", "cp", "tp")
    if on_root:
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names)
    else:
        world = init_device_mesh("cpu", (16,), mesh_dim_names=("world",))
        mesh = world._unflatten(0, (2, 2, 2, 2), names)
    mesh["dp", "cp"]._flatten("dp_cp")
    group = mesh["dp_outer", "dp", "cp"]._flatten("hybrid").get_group()
    index = FSDPDistributedIndex(mesh, "dp_cp", "dp_outer", "tp", group, True)
    assert ranks_of(index.get_fsdp_group()) == [9, 11, 13, 15]
    assert ranks_of(index.get_outer_fsdp_group()) == [5, 13]
    assert ranks_of(index.get_dp_group()) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert index.get_submesh(("dp_outer", "dp_cp")).mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert index.get_submesh(("dp_outer", "dp_cp", "tp")).shape == (2, 4, 2)
    assert index.get_logical_hybrid_fsdp_rank() == (6 % 4) * 2 + 6 // 4


def test_dimensions_in_descending_mesh_order(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp_shard"))
    index = FSDPDistributedIndex(mesh, "dp_shard", tp_dim="tp")
    assert index.get_submesh(("dp_shard", "tp")).mesh.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ranks_of(index.get_fsdp_group()) == [4, 5, 6, 7]
    assert index.get_submesh("tp").mesh.tolist() == [1, 5]


def test_outer_dimension_after_the_shards_needs_an_outer_major_group(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "dp_outer"))
    sorted_ranks = mesh._flatten("hsdp").get_group()
    hint = "sort_ranks=False" if can_order_ranks() else "ranks ascend, with 'dp_outer' before"
    with pytest.raises(ValueError, match=rf"outer-major order: (?!flatten).*{hint}"):
        FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=sorted_ranks)


@pytest.mark.ordered_ranks
def test_outer_dimension_after_the_shards_with_an_outer_major_group(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "dp_outer"))
    outer_major = dist.new_group([0, 2, 4, 6, 1, 3, 5, 7], sort_ranks=False)
    index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", None, outer_major, True)
    assert ranks_of(index.get_outer_fsdp_group()) == [4, 5]
    # rank 5 is in row 1 and column 2 of (outer, shard), so it holds part 1 of shard 2
    assert index.get_logical_hybrid_fsdp_rank() == 2 * 2 + 1


def test_a_slice_of_a_larger_mesh(fake_world) -> None:
    fake_world(13, 16)
    mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", *NAMES))
    stage = mesh[NAMES]
    group = mesh[HYBRID]._flatten("hsdp").get_group()
    index = FSDPDistributedIndex(stage, "dp_shard", "dp_outer", "tp", group)
    assert index.get_root_mesh() is stage
    assert ranks_of(index.get_dp_group()) == [9, 11, 13, 15]
    assert index.get_submesh(NAMES) is stage


# Experts


def test_expert_mesh_of_its_own(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "ep", "dp_shard"))
    index = FSDPDistributedIndex(
        mesh, "dp_shard", "dp_outer", "tp", group, True, expt_device_mesh=experts
    )
    assert ranks_of(index.get_fsdp_group(True)) == [4, 5]
    assert ranks_of(index.get_outer_fsdp_group(is_expert_parallel=True)) == [1, 5]
    assert ranks_of(index.get_dp_group(True)) == [0, 1, 4, 5]
    assert index.get_root_mesh(True) is experts
    assert index.get_submesh(HYBRID, True).mesh.tolist() == [[0, 1], [4, 5]]
    assert index.get_submesh(HYBRID).mesh.tolist() == [[1, 3], [5, 7]]
    assert [key for key in index.mesh_library if key[-1]] == [(*HYBRID, True), ("dp_shard", True)]
    assert index.get_logical_hybrid_fsdp_rank(is_expert_parallel=True) == (3 % 2) * 2 + 3 // 2
    assert index.expt_fsdp_group is index.get_fsdp_group(True)
    assert index.expt_outer_fsdp_group is index.get_outer_fsdp_group(True)
    assert index.hybrid_fsdp_expt_group is index.get_dp_group(True)
    with pytest.raises(ValueError, match=r"no submesh \('tp',\).*is_expert_parallel=True"):
        index.get_submesh("tp", is_expert_parallel=True)


def test_a_missing_expert_group_is_made_once(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "ep", "dp_shard"))

    def made() -> FSDPDistributedIndex:
        return FSDPDistributedIndex(
            mesh, "dp_shard", "dp_outer", None, group, expt_device_mesh=experts
        )

    first, count = made(), dist.distributed_c10d._world.group_count
    assert made().get_dp_group(True) is first.get_dp_group(True)
    assert dist.distributed_c10d._world.group_count == count


def test_experts_with_the_same_ranks_share_the_hybrid_group(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(*HYBRID, "ep"))
    index = FSDPDistributedIndex(
        mesh, "dp_shard", "dp_outer", "tp", group, expt_device_mesh=experts
    )
    assert index.get_dp_group(True) is group


def test_given_expert_groups_are_used(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "ep", "dp_shard"))
    mine, second = dist.new_group([0, 1, 4, 5]), dist.new_group([4, 5])
    index = FSDPDistributedIndex(
        mesh,
        "dp_shard",
        "dp_outer",
        "tp",
        group,
        expt_device_mesh=experts,
        hybrid_fsdp_expt_group=mine,
        expt_fsdp_group_ag=second,
    )
    assert index.get_dp_group(True) is mine
    assert index.get_fsdp_group(True, independent_all_gather=True) is second
    assert index.get_fsdp_group(True) is not second


def test_expert_mesh_without_outer_dimension(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    experts = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "dp_shard"))
    arguments = (mesh, "dp_shard", "dp_outer", "tp", group, True, experts)
    with pytest.raises(ValueError, match=r"lacks dp_outer_dim.*pass hybrid_fsdp_expt_group"):
        FSDPDistributedIndex(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ranks 1, 5, but .* the 2 from place 0 on .* 4-5"):
        FSDPDistributedIndex(*arguments, hybrid_fsdp_expt_group=dist.new_group([1, 5]))  # type: ignore[arg-type]
    index = FSDPDistributedIndex(*arguments, hybrid_fsdp_expt_group=dist.new_group([0, 1, 4, 5]))  # type: ignore[arg-type]
    assert ranks_of(index.get_dp_group(True)) == [0, 1, 4, 5]
    assert index.get_logical_hybrid_fsdp_rank(True) == 3
    assert index.expt_outer_fsdp_group is None
    with pytest.raises(ValueError, match="has no dimension 'dp_outer'"):
        index.get_outer_fsdp_group(True)
    with pytest.raises(ValueError, match="no submesh"):
        index.get_submesh(HYBRID, True)


def test_experts_without_hybrid(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    experts = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "dp_shard"))
    index = FSDPDistributedIndex(mesh, "dp_shard", tp_dim="tp", expt_device_mesh=experts)
    assert index.get_dp_group(True) is index.get_fsdp_group(True)
    assert ranks_of(index.get_dp_group(True)) == [4, 5]
    assert ranks_of(index.get_dp_group()) == [1, 3, 5, 7]
    assert index.get_outer_fsdp_group(True) is None


def test_the_sixth_position_is_not_taken_for_a_flag(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    for group in (dist.group.WORLD, None, 1):
        with pytest.raises(TypeError, match="the sixth position is hybrid_fsdp_expt_group"):
            FSDPDistributedIndex(mesh, "dp", None, "tp", None, group)
        with pytest.raises(TypeError, match="the sixth position is hybrid_fsdp_expt_group"):
            FSDPDistributedIndex(mesh, "dp", None, "tp", None, group, False, mesh, group, group)
    index = FSDPDistributedIndex(mesh, "dp", None, "tp", None, False)
    assert using_tensor_parallel(index) is True
    assert using_tensor_parallel(index, is_expert_parallel=True) is False
    assert using_tensor_parallel(FSDPDistributedIndex(mesh, "dp")) is False
    alone = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "tp"))
    assert using_tensor_parallel(FSDPDistributedIndex(alone, "dp", None, "tp")) is False
    of_experts = FSDPDistributedIndex(alone, "dp", None, "tp", expt_device_mesh=mesh)
    assert using_tensor_parallel(of_experts, is_expert_parallel=True) is True
    assert using_tensor_parallel(of_experts) is False


@pytest.mark.parametrize(
    "ask",
    [
        lambda index: index.get_submesh("dp_shard", True),
        lambda index: index.get_dp_group(True),
        lambda index: index.get_outer_fsdp_group(True),
        lambda index: index.get_root_mesh(True),
        lambda index: index.get_logical_hybrid_fsdp_rank(True),
    ],
    ids=["submesh", "dp", "outer", "root", "logical"],
)
def test_experts_need_an_expert_mesh(fake_world, ask) -> None:
    fake_world(5, 8)
    with pytest.raises(ValueError, match="needs an expert mesh, which the index does not have"):
        ask(hybrid_index(hsdp_outer_dp_shard=True))


# What is refused


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dp_shard_dim": None}, "dp_shard_dim is None.*dp_outer, dp_shard, tp, hsdp"),
        (
            {"dp_shard_dim": "cp"},
            "dp_shard_dim 'cp' is not a dimension .*dp_outer, dp_shard, tp, hsdp",
        ),
        ({"dp_shard_dim": "cp"}, "_unflatten"),
        ({"dp_outer_dim": "pp"}, "dp_outer_dim 'pp' is not a dimension"),
        ({"tp_dim": "tensor"}, "tp_dim 'tensor' is not a dimension"),
        ({"dp_outer_dim": None, "hsdp_outer_dp_shard": True}, "dp_outer_dim, which is None"),
        ({"hybrid_fsdp_group": None}, r"hybrid_fsdp_group, which is None: flatten.*_flatten"),
        ({"dp_outer_dim": "dp_shard"}, "one dimension is given twice"),
        ({"tp_dim": "dp_shard"}, "one dimension is given twice"),
        ({"dp_shard_dim": "hsdp"}, "overlapping.*a separate dimension"),
    ],
    ids=str,
)
def test_refused_arguments(fake_world, change, text: str) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    arguments = {
        "device_mesh": mesh,
        "dp_shard_dim": "dp_shard",
        "dp_outer_dim": "dp_outer",
        "tp_dim": "tp",
        "hybrid_fsdp_group": group,
    }
    with pytest.raises(ValueError, match=text):
        FSDPDistributedIndex(**{**arguments, **change})


@pytest.mark.parametrize(
    "ranks",
    [
        list(range(8)),
        [5, 7],
        [0, 2, 4, 5],
        pytest.param([1, 5, 3, 7], marks=pytest.mark.ordered_ranks),
        [1, 5],
    ],
    ids=str,
)
def test_a_hybrid_group_of_other_ranks(fake_world, ranks: list[int]) -> None:
    fake_world(5, 8)
    mesh, _ = mesh_of_eight()
    order = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    group = dist.new_group(ranks, **order)
    with pytest.raises(ValueError, match=r"hybrid_fsdp_group has ranks .*ranks 1, 3, 5, 7"):
        FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", group)


@pytest.mark.ordered_ranks
def test_the_inner_major_group_has_the_logical_rank_but_is_no_hybrid_group(fake_world) -> None:
    fake_world(3, 8)
    inner_major = dist.new_group([1, 5, 3, 7], sort_ranks=False)
    assert inner_major.rank() == 2
    assert hybrid_index(hsdp_outer_dp_shard=True).get_logical_hybrid_fsdp_rank() == 2


def test_groups_of_wrong_ranks_or_kind(fake_world) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    outside = dist.new_group([0, 1])
    for name in ("hybrid_fsdp_group", "fsdp_group_ag"):
        given = {"hybrid_fsdp_group": group, name: outside}
        with pytest.raises(ValueError, match=f"{name}: rank 5 is not a member"):
            FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", **given)
    with pytest.raises(TypeError, match="hybrid_fsdp_group: got str"):
        FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", "world")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fsdp_group_ag has ranks 4-5.*ranks 5, 7"):
        hybrid_index(fsdp_group_ag=mesh["tp"])
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "ep", "dp_shard"))
    for name in ("hybrid_fsdp_expt_group", "expt_fsdp_group_ag"):
        with pytest.raises(ValueError, match=f"{name}: rank 5 is not a member"):
            hybrid_index(expt_device_mesh=experts, **{name: outside})
        with pytest.raises(ValueError, match=rf"{name} has ranks 1, 3, 5, 7"):
            hybrid_index(expt_device_mesh=experts, **{name: group})


def test_what_is_no_mesh(fake_world) -> None:
    fake_world(5, 8)
    with pytest.raises(TypeError, match="device_mesh must be a DeviceMesh, got list"):
        FSDPDistributedIndex([0, 1], "dp_shard")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expt_device_mesh must be a DeviceMesh, got str"):
        hybrid_index(expt_device_mesh="experts")
    unnamed = DeviceMesh("cpu", torch.arange(8).reshape(2, 4))
    with pytest.raises(ValueError, match=r"dp_shard_dim 'dp' is not a dimension.*mesh_dim_names"):
        FSDPDistributedIndex(unnamed, "dp")


def test_an_expert_mesh_without_the_shard_dimension(fake_world) -> None:
    fake_world(5, 8)
    experts = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_outer", "ep"))
    with pytest.raises(
        ValueError, match="dp_shard_dim 'dp_shard' is not a dimension of expt_device"
    ):
        hybrid_index(expt_device_mesh=experts)


def test_a_rank_outside_the_meshes(fake_world) -> None:
    fake_world(5, 8)
    four = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(ValueError, match="rank 5 is not in the device_mesh"):
        FSDPDistributedIndex(four, "dp_shard", tp_dim="tp")
    eight = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(ValueError, match="rank 5 is not in the expt_device_mesh"):
        FSDPDistributedIndex(eight, "dp_shard", tp_dim="tp", expt_device_mesh=four)


def test_a_missing_expert_group_over_a_part_of_the_world_is_not_made(fake_world) -> None:
    fake_world(5, 16)
    part = torch.arange(8).reshape(2, 2, 2)
    mesh = DeviceMesh("cpu", part, mesh_dim_names=NAMES)
    experts = DeviceMesh("cpu", part, mesh_dim_names=("dp_outer", "ep", "dp_shard"))
    group = dist.new_group([1, 3, 5, 7])
    count = dist.distributed_c10d._world.group_count
    arguments = (mesh, "dp_shard", "dp_outer", "tp", group, False, experts)
    with pytest.raises(ValueError, match=r"not of the whole world: pass hybrid_fsdp_expt_group"):
        FSDPDistributedIndex(*arguments)
    assert dist.distributed_c10d._world.group_count == count
    mine = dist.new_group([0, 1, 4, 5])
    assert FSDPDistributedIndex(*arguments, hybrid_fsdp_expt_group=mine).get_dp_group(True) is mine


def test_a_torch_that_cannot_flatten_asks_for_the_expert_group(fake_world, monkeypatch) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "ep", "dp_shard"))
    monkeypatch.delattr(DeviceMesh, "_flatten")
    with pytest.raises(ValueError, match="pass hybrid_fsdp_expt_group"):
        FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", group, False, experts)


def test_an_index_needs_distributed() -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed"):
        FSDPDistributedIndex(mesh, "dp")


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (("dp_shard", "tp"), True),
        (("dp_outer", "dp_shard", "tp"), True),
        (("dp_shard", None), True),
        (None, True),
        (("dp_shard", "dp_outer"), False),
        ("dp_outer", False),
    ],
    ids=str,
)
def test_an_unregistered_submesh_says_what_there_is(fake_world, names, hint: bool) -> None:
    fake_world(5, 8)
    mesh, group = mesh_of_eight()
    index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=group)
    with pytest.raises(ValueError, match="no submesh") as caught:
        index.get_submesh(names)
    text = str(caught.value)
    assert "('dp_outer', 'dp_shard'), ('dp_shard',)" in text
    assert "is_expert_parallel=False" in text
    assert str(mesh) in text
    assert ("a size-1 TP dim is enough" in text) is hint


def test_no_hint_with_a_tensor_parallel_dimension(fake_world) -> None:
    fake_world(5, 8)
    with pytest.raises(ValueError, match="registered") as caught:
        hybrid_index().get_submesh(("tp", "dp_shard"))
    assert "size-1" not in str(caught.value)


# Real ranks


def reductions_and_places() -> dict[str, float]:
    rank = dist.get_rank()
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (2, 2), HYBRID)
    experts = world._unflatten(0, (2, 2, 1), ("dp_outer", "ep", "dp_shard"))
    index = FSDPDistributedIndex(
        mesh, "dp_shard", "dp_outer", None, mesh._flatten("hsdp"), True, expt_device_mesh=experts
    )
    found = {"logical": index.get_logical_hybrid_fsdp_rank()}
    if can_order_ranks():
        found["inner-major"] = dist.new_group([0, 2, 1, 3], sort_ranks=False).rank()
    groups = {
        "fsdp": index.get_fsdp_group(),
        "outer": index.get_outer_fsdp_group(),
        "hybrid": index.get_dp_group(),
        "expert fsdp": index.get_fsdp_group(True),
        "expert hybrid": index.get_dp_group(True),
    }
    for name, group in groups.items():
        total = torch.tensor(2.0**rank)
        dist.all_reduce(total, group=group)
        found[name] = total.item()
    return found


def test_groups_reduce_over_their_ranks_on_real_ranks() -> None:
    for rank, found in enumerate(run_ranks(reductions_and_places, 4)):
        own, beside, across = 2.0**rank, 2.0 ** (rank ^ 1), 2.0 ** (rank ^ 2)
        place = [0, 2, 1, 3][rank]
        if can_order_ranks():
            assert found.pop("inner-major") == place
        assert found == {
            "logical": place,
            "fsdp": own + beside,
            "outer": own + across,
            "hybrid": 15.0,
            "expert fsdp": own,
            "expert hybrid": own + across,
        }
