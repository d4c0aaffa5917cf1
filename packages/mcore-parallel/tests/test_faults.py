"""Real ranks, one of which fails: one clear error, or an end within seconds, and no hang."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mcore.parallel import (
    FSDPDistributedIndex,
    ProcessGroups,
    check_param_hashes_across_dp_replicas,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_batch_on_this_cp_rank,
    get_pg_rank,
    get_pg_size,
    get_pg_src_rank,
    logical_and_across_model_parallel_group,
    make_sharded_tensor_for_checkpoint,
    reduce_from_tensor_model_parallel_region,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
    reduce_scatter_to_sequence_parallel_region,
    reduce_step_stats,
    resolve_submesh,
    scatter_to_sequence_parallel_region,
)
from mcore.parallel.checkpoint import (
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
    validate_sharding_integrity,
)
from mcore.parallel.groups import comm_device
from rank_testing import RankFailure, run_ranks

VICTIM = 1
HYBRID = ("dp_outer", "dp_shard")


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the type and text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def linear(width: int = 2) -> nn.Linear:
    model = nn.Linear(2, width, bias=False)
    nn.init.ones_(model.weight)
    return model


def weight(value: float, size: int = 4) -> dict[str, ShardedTensor]:
    tensor, copy = torch.full((size,), value), dist.get_rank()
    return {"w": make_sharded_tensor_for_checkpoint(tensor, "w", replica_id=copy)}


# A rank that is not a member


def calls_over(group: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """Everything that takes a group; members make the calls in this order."""
    rank, ones = dist.get_rank(), torch.ones(4, 2)
    tokens = {"tokens": torch.arange(8)[None]}
    return {
        "size": lambda: get_pg_size(group),
        "rank": lambda: get_pg_rank(group),
        "source": lambda: get_pg_src_rank(group),
        "device": lambda: str(comm_device(group)),
        "field": lambda: ProcessGroups(dp=group).size("dp"),
        "stat": lambda: reduce_max_stat_across_model_parallel_group(rank, group),
        "and": lambda: logical_and_across_model_parallel_group(rank > 0, group),
        "memory": lambda: reduce_max_memory_across_pp_group({"peak": rank}, group),
        "step stats": lambda: reduce_step_stats({"a": rank}, {"b": True}, group),
        "copy": lambda: copy_to_tensor_model_parallel_region(ones, group).sum().item(),
        "reduce": lambda: reduce_from_tensor_model_parallel_region(ones, group).sum().item(),
        "gather": lambda: tuple(gather_from_sequence_parallel_region(ones, group=group).shape),
        "reduce-scatter": lambda: (
            reduce_scatter_to_sequence_parallel_region(ones, group=group).sum().item()
        ),
        "scatter": lambda: tuple(scatter_to_sequence_parallel_region(ones, group=group).shape),
        "slice": lambda: get_batch_on_this_cp_rank(tokens, group)["tokens"].tolist(),
        "hashes": lambda: check_param_hashes_across_dp_replicas(linear(), True, dp_group=group),
        "integrity": lambda: validate_sharding_integrity(weight(1.0), group),
        "save": lambda: save_sharded_state_dict(weight(3.0), folder, process_group=group),
        "load": lambda: (
            load_sharded_state_dict(weight(0.0), folder, process_group=group)["w"].sum().item()
        ),
    }


def use_a_group_of_two(folder: str) -> dict[str, Any]:
    group = dist.new_group([0, 1])
    return {name: outcome(call) for name, call in calls_over(group, folder).items()}


def test_outside_a_group_every_call_raises_and_the_members_go_on(tmp_path) -> None:
    first, second, outside = run_ranks(use_a_group_of_two, 3, str(tmp_path / "step_1"))
    for name, (kind, text) in outside.items():
        assert kind == "ValueError", name
        assert "rank 2 is not a member" in text, name
    assert first == {
        "size": 2,
        "rank": 0,
        "source": 0,
        "device": "cpu",
        "field": 2,
        "stat": 1.0,
        "and": False,
        "memory": {"peak": 1},
        "step stats": ({"a": 1.0}, {"b": True}),
        "copy": 8.0,
        "reduce": 16.0,
        "gather": (8, 2),
        "reduce-scatter": 8.0,
        "scatter": (2, 2),
        "slice": [[0, 1, 6, 7]],
        "hashes": True,
        "integrity": None,
        "save": None,
        "load": 12.0,
    }
    assert second == {**first, "rank": 1, "slice": [[2, 3, 4, 5]]}


def use_a_mesh_of_two() -> Any:
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=HYBRID)
    found = {
        "submesh": outcome(lambda: resolve_submesh(mesh, "dp_shard").size()),
        "index": outcome(lambda: FSDPDistributedIndex(mesh, "dp_shard").get_fsdp_group().size()),
    }
    if mesh.get_coordinate() is not None:
        model = fully_shard(linear(), mesh=resolve_submesh(mesh, "dp_shard"))
        found["output"] = model(torch.ones(1, 2)).tolist()
    return found


def test_outside_a_mesh_submesh_and_index_raise_and_the_members_go_on() -> None:
    first, second, outside = run_ranks(use_a_mesh_of_two, 3)
    assert first == second == {"submesh": 2, "index": 2, "output": [[2.0, 2.0]]}
    assert [kind for kind, _ in outside.values()] == ["ValueError", "ValueError"]
    assert "this rank is not in DeviceMesh" in outside["submesh"][1]
    assert "rank 2 is not in the device_mesh" in outside["index"][1]


def use_a_hybrid_group_of_others() -> Any:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=HYBRID)
    group = dist.new_group([0, 1, 2])
    return outcome(
        lambda: FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=group)
    )


def test_a_hybrid_group_that_lacks_a_rank_is_refused_on_all_ranks() -> None:
    *members, outside = run_ranks(use_a_hybrid_group_of_others, 4)
    assert members[0] == members[1] == members[2]
    assert members[0][0] == outside[0] == "ValueError"
    assert "hybrid_fsdp_group has ranks 0-2, but" in members[0][1]
    assert "hybrid_fsdp_group: rank 3 is not a member" in outside[1]


# A rank that disagrees about sizes


def disagree_softly(folder: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.group.WORLD
    size = 4 + (rank == VICTIM)
    keys = {str(number): 1.0 for number in range(size)}
    calls: dict[str, Callable[[], Any]] = {
        "memory": lambda: reduce_max_memory_across_pp_group(keys, world),
        "hashes": lambda: check_param_hashes_across_dp_replicas(linear(size), True, dp_group=world),
        "integrity": lambda: validate_sharding_integrity(weight(1.0, size)),
        "save": lambda: save_sharded_state_dict(weight(1.0, size), folder),
    }
    found = {name: outcome(call) for name, call in calls.items()}
    total = torch.ones(())
    dist.all_reduce(total)  # nobody is left behind in another collective
    return {**found, "after": total.item(), "saved": os.path.exists(folder)}


def test_a_rank_with_other_sizes_is_an_error_on_all_ranks(tmp_path) -> None:
    results = run_ranks(disagree_softly, 3, str(tmp_path / "step_1"))
    for found in results:
        assert (found["after"], found["saved"]) == (3.0, False)
        for name in ("memory", "hashes"):
            assert found[name][0] == "ValueError", found[name]
        for name in ("integrity", "save"):
            assert found[name][0] == "CheckpointingException", found[name]
            assert "global_shape differs" in found[name][1]
            assert "(5,) on rank 1" in found[name][1]
    for name in ("integrity", "save"):
        assert len({found[name] for found in results}) == 1, name


# What each of four ranks asks for, and what all of them are told.
REQUESTS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"tp": 2}, {"tp": 4}, {"tp": 2}, {"tp": 2}], r"tp \(\d here\)"),
    ([{"tp": 2}, {"pp": 2}, {"tp": 2}, {"tp": 2}], r"tp \(\d here\), pp \(\d here\)"),
    ([{}, {"groups": ("tp",)}, {}, {}], r"arguments: groups \(tp"),
    ([{}, {"order": "dp-tp-cp-ep-pp"}, {}, {}], r"arguments: order \("),
    ([{}, {"device_type": "meta"}, {}, {}], r"arguments: device_type \((cpu|meta) here\)"),
    ([{}, {"hcp_sizes": [1]}, {}, {}], r"arguments: hcp_sizes \("),
    ([{}, {"timeout": timedelta(seconds=9)}, {}, {}], r"arguments: timeout \("),
    ([{}, {"backend": "gloo"}, {}, {}], r"arguments: backend \("),
    ([{"tp": 2}, {"tp": 3}, {"tp": 2}, {"tp": 2}], "4 is not divisible by .*= 3"),
    ([{}, {"cp": 0}, {}, {}], "cp must be at least 1, got 0"),
    # new_group would refuse it on members only, after which the ranks count groups differently
    ([{"tp": 2, "backend": "bogus"}] * 4, "no backend 'bogus' .*has .*gloo"),
    ([{"tp": 2, "backend": "cpu:gloo,cuda:none"}] * 4, "no backend 'none'"),
]


def build_with_each() -> list[tuple[Any, float]]:
    found = []
    for arguments, _ in REQUESTS:
        mine = arguments[dist.get_rank()]
        refused = outcome(lambda mine=mine: ProcessGroups.from_sizes(**mine).size("dp"))
        total = torch.ones(())
        dist.all_reduce(total)  # nobody is left behind in the creation of a group
        found.append((refused, total.item()))
    ProcessGroups.from_sizes(tp=2)  # and all can go on
    return found


def test_a_rank_that_asks_for_other_groups_is_an_error_on_all_ranks() -> None:
    for found in run_ranks(build_with_each, 4):
        for (_, text), ((kind, message), total) in zip(REQUESTS, found, strict=True):
            assert (kind, total) == ("ValueError", 4.0)
            assert re.search(text, message), message


def disagree_about_experts() -> Any:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=HYBRID)
    experts = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_shard", "ep", "dp_outer"))
    dense, expert = dist.group.WORLD, dist.new_group([0, 2, 1, 3], sort_ranks=False)

    def index(shard: str = "dp_shard", given: Any = None, of: Any = experts) -> list[int]:
        made = FSDPDistributedIndex(
            *(mesh, shard, "dp_outer", None, dense, False, of), hybrid_fsdp_expt_group=given
        )
        return dist.get_process_group_ranks(made.get_dp_group(is_expert_parallel=True))

    return {
        "one gives a group": outcome(lambda: index(given=expert if rank == VICTIM else None)),
        "one names another": outcome(lambda: index("ep" if rank == VICTIM else "dp_shard")),
        "one gives no mesh": outcome(lambda: index(of=None if rank == VICTIM else experts)),
        "all give it": outcome(lambda: index(given=expert)),
    }


@pytest.mark.ordered_ranks
def test_ranks_whose_expert_meshes_would_create_other_groups_all_raise() -> None:
    for rank, found in enumerate(run_ranks(disagree_about_experts, 4)):
        kind, text = found["one gives a group"]
        assert kind == "ValueError"
        own = "given" if rank == VICTIM else "None"
        assert f"expt_device_mesh=given, hybrid_fsdp_expt_group={own}. " in text
        kind, text = found["one gives no mesh"]
        assert kind == "ValueError"
        assert f"expt_device_mesh={'None' if rank == VICTIM else 'given'}, hybrid_" in text
        kind, text = found["one names another"]
        assert kind == "ValueError"
        assert "dp_shard_dim 'ep' is not a dimension of device_mesh" in text
        assert found["all give it"] == [0, 2, 1, 3]


def disagree_about_the_submesh() -> float:
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=HYBRID)
    hybrid = dist.get_rank() != VICTIM
    index = FSDPDistributedIndex(
        mesh,
        "dp_shard",
        "dp_outer" if hybrid else None,
        hybrid_fsdp_group=dist.group.WORLD if hybrid else None,
    )
    model = fully_shard(linear(), mesh=index.get_submesh(HYBRID))
    return model(torch.ones(1, 2)).sum().item()


def test_a_rank_whose_index_is_not_hybrid_is_named_and_the_others_end() -> None:
    culprit, others = failure_of(disagree_about_the_submesh)
    assert (culprit.rank, culprit.kind, culprit.exception_type) == (VICTIM, "raised", "ValueError")
    assert "no submesh ('dp_outer', 'dp_shard') is registered" in culprit.message
    assert {other.kind for other in others} == {"connection"}


def other_length(name: str) -> Any:
    rows = torch.ones(3 + 3 * (dist.get_rank() == VICTIM), 2)
    world = dist.group.WORLD
    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: reduce_from_tensor_model_parallel_region(rows, world),
        "gather": lambda: gather_from_sequence_parallel_region(rows, group=world),
        "reduce-scatter": lambda: reduce_scatter_to_sequence_parallel_region(rows, group=world),
        "fully_shard": lambda: fully_shard(
            linear(len(rows)), mesh=init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        )(torch.ones(1, 2)),
    }
    return calls[name]()


@pytest.mark.parametrize("name", ["reduce", "gather", "reduce-scatter", "fully_shard"])
def test_tensors_of_other_sizes_end_the_ranks_instead_of_hanging_them(name: str) -> None:
    culprit, others = failure_of(other_length, name)
    assert "hung" not in {report.kind for report in (culprit, *others)}


# A rank that dies


def die_soon(pid_file: Path) -> None:
    """End this process while its main thread waits in a collective."""
    pid_file.with_suffix(".new").write_text(str(os.getpid()))
    pid_file.with_suffix(".new").rename(pid_file)
    threading.Thread(target=lambda: (time.sleep(0.2), os._exit(7)), daemon=True).start()


def wait_for_death(pid_file: Path) -> None:
    while not pid_file.exists():
        time.sleep(0.02)
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    with contextlib.suppress(OSError):  # it is gone
        while state.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.02)


def collectives(folder: str) -> dict[str, Callable[[], Any]]:
    world = dist.group.WORLD
    ones = torch.ones(3, 2)
    return {
        "stats": lambda: reduce_step_stats({"loss": 1.0}, {}, world),
        "memory": lambda: reduce_max_memory_across_pp_group({"peak": 1}, world),
        "reduce": lambda: reduce_from_tensor_model_parallel_region(ones, world),
        "gather": lambda: gather_from_sequence_parallel_region(ones, group=world),
        "hashes": lambda: check_param_hashes_across_dp_replicas(linear(), dp_group=world),
        "save": lambda: save_sharded_state_dict(weight(1.0), folder),
    }


def die_in_a_collective(name: str, folder: str) -> Any:
    call, pid_file = collectives(folder)[name], Path(folder).with_name("victim")
    if dist.get_rank() == VICTIM:
        die_soon(pid_file)
    elif dist.get_rank() == 0:
        wait_for_death(pid_file)  # in the collective, which it cannot leave without this rank
    return call()


@pytest.mark.parametrize("name", ["stats", "memory", "reduce", "gather", "hashes", "save"])
def test_a_rank_that_dies_in_a_collective_ends_the_others(name: str, tmp_path) -> None:
    culprit, others = failure_of(die_in_a_collective, name, str(tmp_path / "step_1"))
    assert (culprit.rank, culprit.kind) == (VICTIM, "died")
    assert {other.rank for other in others} == {0, 2}
    # a save names the ranks that failed in a separate error
    assert {other.kind for other in others} <= {"connection", "raised" if name == "save" else ""}
    assert not (tmp_path / "step_1").exists()


def die_while_training(where: str) -> Any:
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=HYBRID)
    index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=dist.group.WORLD)
    model = fully_shard(linear(6), mesh=index.get_submesh(HYBRID))
    for step in range(3):
        if dist.get_rank() == VICTIM and (where, step) == ("forward", 1):
            os._exit(7)
        loss = model(torch.ones(2, 2)).sum()
        if dist.get_rank() == VICTIM and (where, step) == ("backward", 1):
            os._exit(7)
        loss.backward()
    return loss.item()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies_in_a_step_of_fully_shard_ends_the_others(where: str) -> None:
    culprit, others = failure_of(die_while_training, where)
    assert (culprit.rank, culprit.kind) == (VICTIM, "died")
    assert {(other.rank, other.kind) for other in others} == {(0, "connection"), (2, "connection")}


def failure_of(worker: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Any]]:
    """The report of the culprit and of the others; a rank that waits too long counts as hung."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(worker, 3, *arguments)
    culprit, *others = caught.value.ranks
    return culprit, others
