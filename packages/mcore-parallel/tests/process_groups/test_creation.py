"""Groups that are made and destroyed many times, shared, copied, and outlive their world."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mcore.parallel import (
    FSDPDistributedIndex,
    ProcessGroups,
    check_param_hashes_across_dp_replicas,
    get_default_process_groups,
    get_pg_rank,
    get_pg_size,
    get_pg_src_rank,
    get_tensor_model_parallel_group_if_none,
    logical_and_across_model_parallel_group,
    reduce_from_tensor_model_parallel_region,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
    reduce_step_stats,
    resolve_submesh,
    set_default_process_groups,
)
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import is_destroyed
from rank_testing import run_ranks
from rank_testing.scripts import run_script


def threads_and_files(most: tuple[int, int] | None = None) -> tuple[int, int]:
    """Count them once connections that are being opened or closed have settled."""
    gc.collect()
    dist.barrier()
    counts: list[tuple[int, int]] = []
    deadline = time.monotonic() + 300
    while counts[-10:].count(counts[-1] if counts else (0, 0)) < 10 or (
        most is not None and not is_within(counts[-1], most) and time.monotonic() < deadline
    ):
        time.sleep(0.02)
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts[-1]


def is_within(counts: tuple[int, int], most: tuple[int, int]) -> bool:
    """Whether no more is held: an earlier count may have had a connection that was closing."""
    return counts[0] <= most[0] and counts[1] <= most[1]


def summed(group: dist.ProcessGroup | None) -> float:
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    return total.item()


def make_and_destroy(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ProcessGroups.from_mesh(mesh).destroy()  # the flattened dimensions stay with the mesh
    before = threads_and_files()
    kept = ProcessGroups.from_sizes(tp=2, pp=2)
    summed(kept.tp)
    one = threads_and_files()
    others = [ProcessGroups.from_sizes(tp=2, pp=2) for _ in range(9)]
    found["ten cost as much as one"] = is_within(threads_and_files(one), one)
    found["shared"] = all(other.tp is kept.tp and other.pp is kept.pp for other in others)
    for other in others:
        other.destroy()
    found["in use by one"] = summed(kept.tp)
    kept.destroy()
    found["given back"] = is_within(threads_and_files(before), before)
    for _ in range(rounds):
        pgs = ProcessGroups.from_sizes(tp=4, groups=("tp", "cp", "dp", "pp"))
        assert pgs.dense_mesh is not None
        pgs.destroy()
        ProcessGroups.from_mesh(mesh, groups=("tp", "dp")).destroy()
    del pgs
    found["after many rounds"] = is_within(threads_and_files(before), before)
    found["repr"] = repr(kept)
    found["mesh still works"] = summed(mesh["tp"].get_group())
    pgs = ProcessGroups.from_sizes(tp=2)
    dist.barrier()  # others may still be connecting to this rank
    if dist.get_rank() == 1:
        pgs.destroy()  # as a rank does that has failed alone
    again = ProcessGroups.from_sizes(tp=2)
    found["after a rank destroyed its own"] = summed(again.tp)
    dist.destroy_process_group(again.tp)
    found["after all destroyed one with torch"] = summed(ProcessGroups.from_sizes(tp=2).tp)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads under /proc")
def test_groups_are_shared_and_given_back() -> None:
    for rank, found in enumerate(run_ranks(make_and_destroy, 4, 8)):
        pair = 3.0 if rank < 2 else 12.0
        assert found == {
            "ten cost as much as one": True,
            "shared": True,
            "in use by one": pair,
            "given back": True,
            "after many rounds": True,
            "repr": "ProcessGroups(destroyed)",
            "mesh still works": pair,
            "after a rank destroyed its own": pair,
            "after all destroyed one with torch": pair,
        }


def test_a_part_of_the_groups_of_one_object_is_shared_and_outlives_it(fake_world) -> None:
    counts = set()
    for rank in range(4):
        fake_world(rank, 4)
        first = ProcessGroups.from_sizes(tp=2, groups=("tp", "dp"))
        # The pipelines are those of dp. Only the embedding of the second is a whole pipeline.
        second = ProcessGroups.from_sizes(
            pp=2,
            groups=("embd",),
            embedding_ranks=lambda ranks: ranks if 1 in ranks else ranks[:1],
        )
        assert second.ranks("embd") == {0: [0], 1: [1, 3], 2: [2], 3: [1, 3]}[rank]
        assert (second.embd is first.dp) is (rank in (1, 3))
        tp, dp = first.tp, first.dp
        first.destroy()
        assert is_destroyed(tp)
        assert is_destroyed(dp) is (rank in (0, 2))
        again = ProcessGroups.from_sizes(tp=2, groups=("tp", "dp"))
        assert (again.dp is dp) is (rank in (1, 3))
        second.destroy()
        assert not is_destroyed(again.dp)
        # torch names a group by the number of groups before it, which all ranks count alike.
        counts.add(dist.distributed_c10d._world.group_count)
    assert len(counts) == 1


def test_destroyed_groups_cannot_be_read(fake_world) -> None:
    fake_world(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given = mesh["tp"].get_group()
    for pgs in (ProcessGroups.from_sizes(tp=2), ProcessGroups.from_mesh(mesh)):
        set_default_process_groups(pgs)
        pgs.destroy()
        pgs.destroy()
        for name in ("tp", "cp", "hcp", "dense_mesh"):
            with pytest.raises(RuntimeError, match=f"cannot read {name}: .* destroyed"):
                getattr(pgs, name)
        with pytest.raises(RuntimeError, match="destroyed"):
            pgs.size("tp")
        assert get_default_process_groups() is pgs  # an error, not another default
        with pytest.raises(RuntimeError, match="destroyed"):
            reduce_max_stat_across_model_parallel_group(1.0, None)
        with pytest.raises(AttributeError, match="no field 'xp'"):
            pgs.xp  # noqa: B018
    assert get_pg_size(given) == 2  # of the mesh, which is the caller's


def test_copies_of_a_config_share_the_groups(fake_world) -> None:
    fake_world(1, 4)
    pgs = ProcessGroups.from_sizes(tp=2)
    config = {"groups": pgs, "width": [4]}
    copied = copy.deepcopy(config)
    assert copied["groups"] is pgs
    assert copied["width"] is not config["width"]
    shallow = copy.copy(pgs)
    assert shallow.tp is pgs.tp
    shallow.tp = None
    shallow.destroy()  # it owns nothing
    assert pgs.size("tp") == 2
    with pytest.raises(TypeError, match=r"cannot pickle ProcessGroups\(tp=2.*from_sizes"):
        pickle.dumps(config)
    assert pickle.loads(pickle.dumps(ProcessGroups())) == ProcessGroups()
    mesh = pgs.dense_mesh
    assert mesh is pgs.dense_mesh is copy.copy(pgs).dense_mesh


def timeout_of(group: Any) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def timeouts_and_options() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    job = timedelta(seconds=77)
    prefixed = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=job)
    pgs = ProcessGroups.from_sizes(tp=2)
    short = timedelta(seconds=55)
    other = ProcessGroups.from_sizes(tp=2, timeout=short)
    options = dist.ProcessGroupGloo._Options()
    options.group_name = "mine"
    own = ProcessGroups.from_sizes(tp=2, pg_options={"tp": options}, backend="gloo")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    meshed = ProcessGroups.from_mesh(mesh, timeout=short)
    plain = ProcessGroups.from_mesh(mesh)
    sized = ProcessGroups.from_mesh(mesh, pg_options={"dp": options}, groups=("dp", "tp"))
    return {
        "job": {timeout_of(pgs.tp), timeout_of(pgs.dp), timeout_of(pgs.pos_embd or pgs.pp)},
        "given": (timeout_of(other.tp), other.tp is pgs.tp, timeout_of(other.mp)),
        "options": (timeout_of(own.tp), own.tp is pgs.tp, own.tp is own.expt_tp, summed(own.tp)),
        "mesh": (timeout_of(meshed.mp), plain.mp is dist.group.WORLD),
        "mesh options": sized.dp is mesh["dp"].get_group(),
        "world": timeout_of(dist.group.WORLD),
    }


def test_groups_take_the_timeout_of_the_job_or_their_own() -> None:
    job, short = timedelta(seconds=77), timedelta(seconds=55)
    for rank, found in enumerate(run_ranks(timeouts_and_options, 4)):
        assert found == {
            "job": {job},
            "given": (short, False, short),
            "options": (job, False, False, 3.0 if rank < 2 else 12.0),
            "mesh": (short, True),
            "mesh options": False,
            "world": job,
        }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"timeout": 5}, r"timeout must be a datetime.timedelta or None, got 5"),
        ({"timeout": timedelta(0)}, "timeout must be positive"),
        ({"pg_options": {"xp": None}}, "pg_options has 'xp', which is no group"),
    ],
    ids=str,
)
def test_settings_of_groups_are_checked(fake_world, arguments, text: str) -> None:
    fake_world(0, 2)
    with pytest.raises((TypeError, ValueError), match=text):
        ProcessGroups.from_sizes(**arguments)


def outcome(call: Any) -> str:
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def calls_over(group: Any, mesh: Any) -> dict[str, Any]:
    ones = torch.ones(2)
    return {
        "size": lambda: get_pg_size(group),
        "rank": lambda: get_pg_rank(group),
        "source": lambda: get_pg_src_rank(group),
        "device": lambda: comm_device(group),
        "default": lambda: get_tensor_model_parallel_group_if_none(group),
        "stat": lambda: reduce_max_stat_across_model_parallel_group(1.0, group),
        "and": lambda: logical_and_across_model_parallel_group(True, group),
        "memory": lambda: reduce_max_memory_across_pp_group({"a": 1}, group),
        "step": lambda: reduce_step_stats({"a": 1}, {}, group),
        "region": lambda: reduce_from_tensor_model_parallel_region(ones, group),
        "hashes": lambda: check_param_hashes_across_dp_replicas(nn.Linear(1, 1), dp_group=group),
        "field": lambda: ProcessGroups(tp=group).ranks("tp"),
        "1-D mesh": lambda: get_pg_size(mesh),
        "submesh": lambda: resolve_submesh(mesh, "tp"),
        "from_mesh": lambda: ProcessGroups.from_mesh(mesh),
        "index": lambda: FSDPDistributedIndex(mesh, "tp"),
    }


def test_a_group_of_a_destroyed_world_is_refused_everywhere(fake_world) -> None:
    fake_world(1, 4)
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    pgs = ProcessGroups.from_sizes(tp=4)
    assert pgs.size("tp") == 4
    dist.destroy_process_group()
    needs_a_world = {"from_mesh", "index"}
    for world in ("none", "new"):
        if world == "new":
            fake_world(1, 4)
            dist.new_group([0, 1])
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, call in calls_over(group, mesh).items():
            unready = name in needs_a_world and world == "none"
            found = outcome(call)
            words = ("needs torch.distributed",) if unready else ("destroyed", "init_process_group")
            assert found.startswith("RuntimeError" if unready else "ValueError"), (world, name)
            assert all(word in found for word in words), (world, name, found)
        with pytest.raises(ValueError, match="destroyed"):
            pgs.size("tp")
        with pytest.raises(ValueError, match="destroyed"):
            pgs.dense_mesh  # noqa: B018
    own = dist.new_group([0, 1])
    dist.destroy_process_group(own)
    with pytest.raises(ValueError, match="destroyed, alone or with"):
        get_pg_size(own)


LEAVE_A_DESTROYED_WORLD = """
import atexit, datetime, os, torch.distributed as dist
def is_exiting(task):  # a thread that was joined is listed until the kernel is done with it
    try:
        with open(f"/proc/self/task/{task}/stat") as stat:
            return bool(int(stat.read().rpartition(")")[2].split()[6]) & 4)  # PF_EXITING
    except OSError:
        return True
def threads(): return sum(not is_exiting(task) for task in os.listdir("/proc/self/task"))
import mcore.parallel as parallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
before = threads()
atexit.register(lambda: print(threads() - before))  # runs after what is registered from here on
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = parallel.ProcessGroups.from_sizes()
kept.dense_mesh
own = parallel.ProcessGroups.from_sizes(timeout=datetime.timedelta(seconds=9))
parallel.set_default_process_groups(own)
del own
dist.destroy_process_group()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads under /proc")
def test_no_thread_of_a_destroyed_world_is_left_when_python_ends() -> None:
    ended = run_script(LEAVE_A_DESTROYED_WORLD)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
