"""FSDPDistributedIndex against megatron-fsdp's, for every valid combination of dimensions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mcore.parallel import FSDPDistributedIndex

WORLD = 8
HYBRID = ("dp_outer", "dp_shard")


def peer_index() -> Any:
    """The peer's class, which the environment ``dev`` lacks."""
    return importlib.import_module("megatron_fsdp.utils").FSDPDistributedIndex


@dataclass(frozen=True)
class Case:
    """Sizes of a dense mesh in its order, those of an expert mesh, and the kind of the index."""

    dense: tuple[tuple[str, int], ...]
    expert: tuple[tuple[str, int], ...]
    is_full: bool
    has_tp: bool


def shapes(names: tuple[str, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every way to share the ranks among the named dimensions."""
    for sizes in product((1, 2, 4, 8), repeat=len(names)):
        total = 1
        for size in sizes:
            total *= size
        if total == WORLD:
            yield tuple(zip(names, sizes, strict=True))


def cases() -> list[Case]:
    found = []
    for dims in (("dp_shard",), ("dp_shard", "tp"), HYBRID, (*HYBRID, "tp")):
        is_hybrid, has_tp = "dp_outer" in dims, "tp" in dims
        experts: list[tuple[tuple[str, int], ...]] = [()]
        expert_dims = ("ep", *(("dp_outer",) if is_hybrid else ()), "dp_shard")
        experts += list(shapes((*expert_dims, "tp") if has_tp else expert_dims))
        for dense, expert in product(shapes(dims), experts):
            for is_full in (False, True) if is_hybrid else (False,):
                found.append(Case(dense, expert, is_full, has_tp))
    return found


def mesh_of(sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, shape = zip(*sizes, strict=True)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def facts(index: Any, case: Case, *, is_expert: bool) -> dict[str, Any]:
    """Ranks of every group and submesh that both hand out."""
    is_hybrid = "dp_outer" in dict(case.dense)
    groups = {
        "dp": index.get_dp_group(is_expert_parallel=is_expert),
        "fsdp": index.get_fsdp_group(is_expert_parallel=is_expert),
    }
    found: dict[str, Any] = {}
    if not is_expert:
        groups["outer"] = index.get_outer_fsdp_group()
        if case.is_full:
            found["logical rank"] = index.get_logical_hybrid_fsdp_rank()
    names: list[tuple[str, ...]] = [("dp_shard",), *([HYBRID] if is_hybrid else [])]
    names += [("tp",), *[(*name, "tp") for name in names]] if case.has_tp else []
    for dims in names:
        mesh = index.get_submesh(dims, is_expert_parallel=is_expert)
        found[" ".join(dims)] = (mesh.mesh_dim_names, mesh.mesh.tolist())
    root = index.get_root_mesh(is_expert_parallel=is_expert)
    found["root"] = root.mesh_dim_names
    for name, group in groups.items():
        found[name] = None if group is None else dist.get_process_group_ranks(group)
    return found


@pytest.fixture
def one_of_eight() -> Iterator[Any]:
    """Become one rank after another of a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 5])
def test_every_combination_has_the_same_groups_and_submeshes(one_of_eight: Any, rank: int) -> None:
    compared = 0
    for case in cases():
        one_of_eight(rank)
        mesh = mesh_of(case.dense)
        is_hybrid = "dp_outer" in dict(case.dense)
        hybrid = mesh[HYBRID]._flatten("hsdp").get_group() if is_hybrid else None
        dims = ("dp_shard", "dp_outer" if is_hybrid else None, "tp" if case.has_tp else None)
        experts = mesh_of(case.expert) if case.expert else None
        expert_group = None
        if experts is not None and is_hybrid:
            expert_group = experts[HYBRID]._flatten("expert_hsdp").get_group()
        ours = FSDPDistributedIndex(
            *(mesh, *dims, hybrid, case.is_full, experts), hybrid_fsdp_expt_group=expert_group
        )
        theirs = peer_index()(
            *(mesh, *dims, hybrid),
            hsdp_outer_dp_shard=case.is_full,
            expt_device_mesh=experts,
            hybrid_fsdp_expt_group=expert_group,
        )
        for is_expert in (False, True) if case.expert else (False,):
            mine, other = (facts(index, case, is_expert=is_expert) for index in (ours, theirs))
            assert mine == other, (case, is_expert)
            compared += 1
    assert compared > 500


# Where theirs is wrong: what it does, and what ours does


def outcome(call: Any) -> str:
    try:
        return repr(call())
    except Exception as error:
        return type(error).__name__


def test_what_the_peer_gets_wrong(one_of_eight: Any) -> None:
    """Theirs first. Dimensions out of mesh order are served only here."""
    one_of_eight(5)
    mesh = mesh_of((("dp_outer", 2), ("dp_shard", 2), ("tp", 2)))
    hybrid = mesh[HYBRID]._flatten("hsdp").get_group()
    no_outer = mesh_of((("ep", 4), ("dp_shard", 2)))
    found: dict[str, tuple[str, str]] = {}
    for kind, place in ((peer_index(), 0), (FSDPDistributedIndex, 1)):
        calls: dict[str, Any] = {
            "a hybrid group with other ranks": lambda kind=kind: len(
                dist.get_process_group_ranks(
                    kind(mesh, "dp_shard", "dp_outer", "tp", dist.group.WORLD).get_dp_group()
                )
            ),
            "a tp_dim that the mesh lacks": lambda kind=kind: (
                kind(mesh, "dp_shard", None, "t") and 1
            ),
            "experts without an expert mesh": lambda kind=kind: kind(mesh, "dp_shard").get_dp_group(
                is_expert_parallel=True
            ),
            "dense ranks for experts without the outer dimension": lambda kind=kind: (
                kind(
                    *(mesh, "dp_shard", "dp_outer", "tp", hybrid),
                    expt_device_mesh=no_outer,
                    hybrid_fsdp_expt_group=dist.new_group([0, 1, 4, 5]),
                )
                .get_submesh(HYBRID, is_expert_parallel=True)
                .mesh.tolist()
            ),
        }
        for order in permutations((*HYBRID, "tp")):
            turned = mesh_of(tuple((name, 2) for name in order))
            calls[f"mesh {order}"] = lambda kind=kind, turned=turned: list(
                kind(turned, "dp_shard", tp_dim="tp").get_submesh(("dp_shard", "tp")).mesh_dim_names
            )
        for name, call in calls.items():
            pair = found.get(name, ("", ""))
            found[name] = (outcome(call), pair[1]) if place == 0 else (pair[0], outcome(call))
    of_mesh = "['dp_shard', 'tp']"
    assert found == {
        "a hybrid group with other ranks": ("8", "ValueError"),
        "a tp_dim that the mesh lacks": ("1", "ValueError"),
        "experts without an expert mesh": ("None", "ValueError"),
        "dense ranks for experts without the outer dimension": ("[[1, 3], [5, 7]]", "ValueError"),
        "mesh ('dp_outer', 'dp_shard', 'tp')": (of_mesh, of_mesh),
        "mesh ('dp_outer', 'tp', 'dp_shard')": ("KeyError", of_mesh),
        "mesh ('dp_shard', 'dp_outer', 'tp')": (of_mesh, of_mesh),
        "mesh ('dp_shard', 'tp', 'dp_outer')": (of_mesh, of_mesh),
        "mesh ('tp', 'dp_outer', 'dp_shard')": ("KeyError", of_mesh),
        "mesh ('tp', 'dp_shard', 'dp_outer')": ("KeyError", of_mesh),
    }
