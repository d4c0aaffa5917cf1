"""Meshes that others made: every dimension counts, by any name, or the mesh is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mcore.parallel import ProcessGroups, check_param_hashes_across_dp_replicas
from rank_testing import run_ranks


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def flattened_as_torchtitan_does(mesh: DeviceMesh, **flattened: tuple[str, ...]) -> DeviceMesh:
    for name, dims in flattened.items():
        mesh[dims]._flatten(name)
    return mesh


def ranks_of(pgs: ProcessGroups, *names: str) -> dict[str, list[int] | None]:
    return {n: None if getattr(pgs, n) is None else pgs.ranks(n) for n in names}


def as_grid(world: int, *shape: int) -> torch.Tensor:
    return torch.arange(world).reshape(shape)


def test_replicas_and_shards_are_data_parallel_with_the_groups_that_were_flattened(
    fake_world,
) -> None:
    fake_world(5, 16)
    mesh = flattened_as_torchtitan_does(
        mesh_of(dp_replicate=2, dp_shard=2, cp=2, tp=2),
        dp=("dp_replicate", "dp_shard"),
        dp_shard_cp=("dp_shard", "cp"),
        dp_cp=("dp_replicate", "dp_shard", "cp"),
    )
    pgs = ProcessGroups.from_mesh(mesh)
    grid = as_grid(16, 2, 2, 2, 2)  # rank 5 is [0, 1, 0, 1]
    assert ranks_of(pgs, "dp", "dp_cp", "cp", "tp", "tp_dp_cp", "pp", "ep") == {
        "dp": grid[:, :, 0, 1].flatten().tolist(),
        "dp_cp": grid[:, :, :, 1].flatten().tolist(),
        "cp": [5, 7],
        "tp": [4, 5],
        "tp_dp_cp": list(range(16)),
        "pp": None,
        "ep": None,
    }
    assert pgs.dp is mesh.get_group("dp")
    assert pgs.dp_cp is mesh.get_group("dp_cp")
    again = mesh_of(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert ranks_of(ProcessGroups.from_mesh(again), "dp", "dp_cp") == ranks_of(pgs, "dp", "dp_cp")


def test_foreign_names_of_data_and_tensor_parallelism_need_no_argument(fake_world) -> None:
    grid = as_grid(16, 2, 2, 2, 2)  # rank 5 is [0, 1, 0, 1]
    of_titan = {"dp": grid[:, :, 0, 1].flatten().tolist(), "cp": [5, 7], "tp": [4, 5]}
    meshes = {
        "a dimension of torchtitan's for all data": mesh_of,
        "flattened ones that overlap what is there": lambda **_: flattened_as_torchtitan_does(
            mesh_of(dp_replicate=2, dp_shard=2, cp=2, tp=2),
            batch=("dp_replicate", "dp_shard"),
            fsdp=("dp_shard", "cp"),
            loss=("dp_replicate", "dp_shard", "cp"),
        ),
    }
    for make in meshes.values():
        fake_world(5, 16)
        pgs = ProcessGroups.from_mesh(make(batch=4, cp=2, tp=2))
        assert ranks_of(pgs, *of_titan) == of_titan
    fake_world(5, 8)
    of_lightning = ProcessGroups.from_mesh(mesh_of(data_parallel=4, tensor_parallel=2))
    assert all_fields(of_lightning) == {
        **dict.fromkeys(all_fields(of_lightning)),
        **{name: [1, 3, 5, 7] for name in ("dp", "dp_cp", "intra_dp_cp")},
        **{name: [4, 5] for name in ("tp", "mp", "tp_cp")},
        "tp_dp_cp": list(range(8)),
    }


@pytest.mark.parametrize("rank", [0, 5, 14])
def test_experts_in_a_mesh_whose_flattened_dimension_they_are(fake_world, rank: int) -> None:
    fake_world(rank, 16)
    mesh = flattened_as_torchtitan_does(
        mesh_of(pp=2, dp_shard_mod_ep=1, dp_shard_in_ep=2, cp=2, tp=2),
        dp=("dp_shard_mod_ep", "dp_shard_in_ep"),
        dp_shard_cp=("dp_shard_mod_ep", "dp_shard_in_ep", "cp"),
        dp_cp=("dp_shard_mod_ep", "dp_shard_in_ep", "cp"),
        ep=("dp_shard_in_ep", "cp"),
    )
    found = all_fields(ProcessGroups.from_mesh(mesh))
    wanted = all_fields(ProcessGroups.from_sizes(tp=2, cp=2, pp=2, ep=4, expt_tp=2))
    assert found == wanted


@pytest.mark.parametrize("rank", [0, 5, 14])
@pytest.mark.parametrize("dense", [(2, 1, 2, 2, 2), (2, 1, 4, 2)], ids=len)
def test_two_meshes_unflattened_from_one_world(fake_world, rank: int, dense: Any) -> None:
    fake_world(rank, 16)
    world = mesh_of(world=16)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    if len(dense) == 4:
        names = ("pp", "dp_replicate", "fsdp", "tp")
    expert = world._unflatten(0, (2, 1, 2, 4, 1), ("pp", "dp_replicate", "efsdp", "ep", "etp"))
    pgs = ProcessGroups.from_mesh(world._unflatten(0, dense, names), expert)
    found = all_fields(pgs)
    cp = 2 if len(dense) == 5 else 1
    wanted = all_fields(ProcessGroups.from_sizes(tp=2, cp=cp, pp=2, ep=4, expt_tp=1))
    if cp == 1:
        wanted |= {"cp": None, "tp_cp": found["tp_cp"]}
    assert found == wanted


def all_fields(pgs: ProcessGroups) -> dict[str, list[int] | None]:
    names = ("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "ep", "expt_tp", "tp_ep")
    more = ("tp_ep_pp", "dp", "dp_cp", "tp_dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp")
    return ranks_of(pgs, *names, *more)


def test_an_expert_dimension_beside_the_dense_ones_holds_copies_of_dense_layers(fake_world) -> None:
    fake_world(5, 16)
    pgs = ProcessGroups.from_mesh(mesh_of(dp_replicate=2, dp_shard=2, ep=2, tp=2))
    assert ranks_of(pgs, "dp", "ep", "expt_dp", "expt_tp", "tp") == {
        "dp": [1, 3, 5, 7, 9, 11, 13, 15],
        "ep": [5, 7],
        "expt_dp": [1, 5, 9, 13],
        "expt_tp": [4, 5],
        "tp": [4, 5],
    }


def test_the_hierarchy_of_context_parallelism_is_never_another_group(fake_world) -> None:
    fake_world(5, 16)
    pgs = ProcessGroups.from_mesh(mesh_of(pp=2, dp=2, cp=2, tp=2))
    assert pgs.hcp is None
    mesh = mesh_of(pp=2, outer=2, inner=2, tp=2)
    names = {"cp": ("outer", "inner"), "hcp": ("inner", "outer")}
    nested = ProcessGroups.from_mesh(mesh, names=names)
    assert nested.hcp is not None
    levels = [dist.get_process_group_ranks(group) for group in nested.hcp]
    assert levels == [[5, 7], [1, 5]]
    sizes = ProcessGroups.from_sizes(tp=2, cp=4, pp=2, hcp_sizes=[2, 2])
    assert levels == [dist.get_process_group_ranks(group) for group in sizes.hcp or ()]
    assert nested.ranks("cp") == sizes.ranks("cp")


@pytest.mark.parametrize(
    ("sizes", "names", "text"),
    [
        ({"zone": 2, "tp": 4}, {}, r"'zone' \(2 ranks\)\. .*names=\{'dp': \('zone',\)\}"),
        ({"dp_replicate": 2, "zone": 4}, {}, r"names=\{'dp': \('dp_replicate', 'zone'\)\}"),
        ({"a": 2, "tp": 4}, {"cp": "a", "dp": "a"}, "'a' of mesh stands for cp and for dp"),
        ({"a": 2, "tp": 4}, {"tp_dp_cp": ("a", "tp")}, "stand for no parallelism.* 'a' "),
        ({"a": 2, "b": 2, "c": 2}, {}, r"'a' \(2 ranks\), 'b' \(2 ranks\), 'c' .*\{'dp': \('a',"),
        (
            {"a": 2, "tp": 4},
            {"dp": ("a", "b")},
            "dp to 'b', which mesh does not have. It has a, tp",
        ),
    ],
    ids=str,
)
def test_dimensions_left_over_or_used_twice_are_refused(fake_world, sizes, names, text) -> None:
    fake_world(1, 8)
    with pytest.raises(ValueError, match=text):
        ProcessGroups.from_mesh(mesh_of(**sizes), names=names)
    ProcessGroups.from_mesh(mesh_of(zone=1, tp=8))  # one rank is nobody's loss


def test_embedding_ranks_of_a_mesh_can_be_chosen(fake_world) -> None:
    fake_world(2, 8)
    pgs = ProcessGroups.from_mesh(
        mesh_of(pp=4, tp=2),
        embedding_ranks=lambda ranks: ranks[1:3],
        position_embedding_ranks=lambda ranks: [ranks[1]],
    )
    assert (pgs.ranks("embd"), pgs.ranks("pos_embd")) == ([2, 4], [2])


def reduce_beside_a_dimension_that_moves_nothing() -> list[object]:
    world = mesh_of(world=8)
    dense = world._unflatten(0, (2, 2, 2), ("dp_replicate", "cp", "tp"))
    expert = world._unflatten(
        0, (2, 4, 1), ("dp_replicate", "efsdp", "ep"), backend_override={"efsdp": "fake"}
    )
    pgs = ProcessGroups.from_mesh(dense, expert)
    found: list[object] = []
    for group in (pgs.tp_cp, pgs.expt_dp):
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        found.append(total.item())
    return found


def test_groups_that_a_mesh_has_only_for_show_are_not_used() -> None:
    assert run_ranks(reduce_beside_a_dimension_that_moves_nothing, 8) == [[4.0, 8.0]] * 8


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_four_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    dist.barrier()
    mesh = mesh_of(dp_replicate=2, cp=1, tp=2)
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, float(rank >= 2))  # other weights on the second replica
    pgs = ProcessGroups.from_mesh(mesh)
    found: dict[str, Any] = {
        "replicas": check_param_hashes_across_dp_replicas(model, True, dp_group=pgs.dp_cp)
    }
    other = ("tp", "cp") if rank == 1 else None
    bad = {"dp": "zone"} if rank == 2 else {"dp": "dp_replicate"}
    turned = mesh_of(tp=2, dp_replicate=2)
    calls = {
        "groups": lambda: ProcessGroups.from_mesh(mesh, groups=other),
        "names": lambda: ProcessGroups.from_mesh(mesh, names=bad),
        "mesh": lambda: ProcessGroups.from_mesh(turned if rank == 3 else mesh),
        "embedding": lambda: ProcessGroups.from_mesh(
            mesh_of(pp=4), embedding_ranks=lambda ranks: ranks[rank % 2 :]
        ),
        "constructor": lambda: (
            ProcessGroups.from_mesh(mesh) if rank else ProcessGroups.from_sizes(tp=2)
        ),
    }
    found |= {name: outcome(call) for name, call in calls.items()}
    total = torch.ones(())
    dist.all_reduce(total)  # nobody is left behind
    return {
        **found,
        "after": total.item(),
        "slice": ProcessGroups.from_mesh(mesh["tp"]).ranks("tp"),
    }


def test_ranks_that_disagree_about_a_mesh_all_raise() -> None:
    for rank, found in enumerate(run_ranks(on_four_ranks, 4)):
        assert found["replicas"] is False
        assert "different arguments: groups (" in found["groups"]
        assert "names maps dp to 'zone', which mesh does not have" in found["names"]
        assert "different arguments: mesh (" in found["mesh"]
        assert "different arguments: embedding_ranks (" in found["embedding"]
        assert "the arguments " in found["constructor"]
        assert all(text.startswith("ValueError") for text in list(found.values())[1:6])
        assert found["after"] == 4.0
        assert found["slice"] == [rank - rank % 2, rank - rank % 2 + 1]
