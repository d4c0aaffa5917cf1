"""The number of collectives in a save and in a load, which decides their speed on many ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mcore.parallel.checkpoint import (
    CheckpointManager,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from rank_testing import run_ranks

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "barrier"),
    *("all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "new_group"),
)


def count_collectives() -> list[str]:
    """Record the name of every call of a collective, in all threads of this process."""
    from torch import distributed as dist

    calls: list[str] = []

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return collective(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, watched(name, getattr(dist, name)))
    return calls


def saves_and_loads(folder: str) -> dict[str, list[str]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    root, size = Path(folder), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("other", "dp"))["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)  # a replica of each shard is outside the mesh
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    calls, found = count_collectives(), {}

    def count(name: str, work: Callable[[], Any]) -> None:
        calls.clear()
        work()
        found[name] = list(calls)

    state = {**model.state_dict(), "step": 1}
    count("save", lambda: save_sharded_state_dict(state, root / "a"))
    count("checked", lambda: save_sharded_state_dict(state, root / "b", check_replicas=True))
    save_sharded_state_dict(state, root / "c", async_=True).result()
    count("async", lambda: save_sharded_state_dict(state, root / "d", async_=True).result())
    count("load", lambda: load_sharded_state_dict(state, root / "a"))
    manager = CheckpointManager(root / "run", keep=1)
    values = {"epoch": 3, "seen": dist.get_rank()}
    count("manager", lambda: manager.save(model, optimizer, step=1, **values))
    count("manager again", lambda: manager.save(model, optimizer, step=2, **values))
    return found


MOST = {"save": 6, "checked": 6, "async": 6, "manager": 8, "manager again": 8, "load": 4}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_save_has_three_phases(tmp_path: Path, ranks: int) -> None:
    for found in run_ranks(saves_and_loads, ranks, str(tmp_path)):
        assert found.keys() == MOST.keys()
        for name, calls in found.items():
            assert 0 < len(calls) <= MOST[name], (name, calls)
