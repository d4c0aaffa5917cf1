"""Group queries against ranks that were written down by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mcore.parallel import get_pg_rank, get_pg_size, get_pg_src_rank
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import can_order_ranks, is_distributed
from rank_testing import run_ranks

QUERIES = (get_pg_size, get_pg_rank, get_pg_src_rank)


class StandIn:
    """A user's own object in place of a group."""

    def size(self) -> int:
        return 8

    def rank(self) -> int:
        return 3


def answers(group: object) -> tuple[object, ...]:
    """The three queries, each its value or the name of its error."""

    def ask(query):  # type: ignore[no-untyped-def]
        try:
            return query(group)
        except (TypeError, ValueError) as error:
            return type(error).__name__

    return tuple(ask(query) for query in QUERIES)


@pytest.mark.parametrize(
    "group", [None, object(), StandIn(), -100], ids=["none", "object", "stand-in", "number"]
)
def test_without_distributed_every_group_is_one_rank(group: object) -> None:
    assert answers(group) == (1, 0, 0)
    assert not is_distributed()
    assert comm_device(group) == torch.device("cpu")  # type: ignore[arg-type]


def ranks_of_new_groups() -> dict[str, object]:
    odd = dist.new_group([3, 1])
    listed = dist.new_group([3, 1], sort_ranks=False) if can_order_ranks() else None
    pair = dist.new_group([0, 2])  # a second group that ranks 1 and 3 have not joined
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    partial = dist.device_mesh.DeviceMesh("cpu", [1, 2])
    ordered = {"listed": answers(listed)} if can_order_ranks() else {}
    return ordered | {
        "none": answers(None),
        "odd": answers(odd),
        "pair": answers(pair),
        "world": answers(dist.group.WORLD),
        "dp": answers(mesh["dp"]),
        "2-D": answers(mesh),
        "partial": answers(partial),
        "stand-in": answers(StandIn()),
        "object": answers(object()),
        "devices": [str(comm_device(group)) for group in (None, mesh["tp"], StandIn())],
    }


def test_queries_on_four_ranks() -> None:
    no_member = ("ValueError",) * 3
    expected = [
        {"odd": no_member, "listed": no_member, "pair": (2, 0, 0), "dp": (2, 0, 0)},
        {"odd": (2, 0, 1), "listed": (2, 1, 3), "pair": no_member, "dp": (2, 0, 1)},
        {"odd": no_member, "listed": no_member, "pair": (2, 1, 0), "dp": (2, 1, 0)},
        {"odd": (2, 1, 1), "listed": (2, 0, 3), "pair": no_member, "dp": (2, 1, 1)},
    ]
    results = run_ranks(ranks_of_new_groups, 4)
    for rank, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        wanted |= {
            "none": (1, 0, 0),
            "world": (4, rank, 0),
            "2-D": ("TypeError",) * 3,
            "partial": (2, rank - 1, 1) if rank in (1, 2) else no_member,
            "stand-in": (8, 3, "TypeError"),
            "object": ("TypeError",) * 3,
            "devices": ["cpu"] * 3,
        }
        if not can_order_ranks():
            del wanted["listed"]
        assert found == wanted


@pytest.mark.parametrize("query", QUERIES)
def test_error_of_a_non_member_says_who_and_what_to_do(fake_world, query) -> None:
    fake_world(2, 4)
    with pytest.raises(ValueError, match=r"rank 2 is not a member.*-100.*members only"):
        query(dist.new_group([0, 1]))


def test_error_of_a_wide_mesh_names_its_shape(fake_world) -> None:
    fake_world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(TypeError, match=r"2-D DeviceMesh \(2, 2\)"):
        get_pg_size(mesh)


def test_comm_device_follows_the_backend_not_the_machine(fake_world) -> None:
    fake_world(0, 2, "cpu:fake,xpu:fake")
    assert comm_device(dist.group.WORLD) == torch.device("cpu")
    fake_world(0, 2, "xpu:fake")
    assert comm_device(dist.group.WORLD).type == "xpu"
    assert comm_device(None).type == "xpu"
    with pytest.raises(ValueError, match="not a member"):
        comm_device(dist.new_group([1]))


def test_comm_device_is_the_device_that_the_world_is_bound_to(fake_world) -> None:
    fake_world(0, 2, "xpu:fake")
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("xpu", 1)
    assert comm_device(world) == comm_device(None) == torch.device("xpu", 1)
    world.bound_device_id = torch.device("cuda", 1)  # a group of another backend inherits this
    assert comm_device(world).type == "xpu"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks the device of an nccl group")
def test_comm_device_of_nccl_is_the_current_gpu_and_of_gloo_the_cpu() -> None:
    for backend, kind in (("nccl", "cuda"), ("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu")):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            device = comm_device(dist.group.WORLD)
            assert device.type == kind
            assert kind == "cpu" or device.index == torch.cuda.current_device()
        finally:
            dist.destroy_process_group()
