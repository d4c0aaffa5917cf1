"""Both planners in torch's own save and load, and DTensors that make the round trip."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    ShardedLoadPlanner,
    ShardedObject,
    ShardedSavePlanner,
    ShardedTensor,
    is_complete_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from rank_testing import run_ranks

WHOLE = torch.arange(30.0).reshape(10, 3)
UNEVEN = torch.arange(15.0).reshape(5, 3) + 0.5
TINY = torch.arange(3.0).reshape(1, 3) + 100


def dtensors(mesh_shape: tuple[int, ...], filled: bool) -> dict[str, Any]:
    """Even, uneven and mostly empty shards, cut over all mesh dimensions or replicated over one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape)
    cuts = [Shard(0) for _ in mesh_shape]
    some = [Replicate(), *[Shard(1) for _ in mesh_shape[1:]]]
    made = {}
    for name, whole, placements in (
        ("whole", WHOLE, cuts),
        ("uneven", UNEVEN, cuts),
        ("tiny", TINY, cuts),
        ("some", WHOLE, some),
    ):
        content = whole if filled else torch.zeros_like(whole)
        made[name] = distribute_tensor(content.clone(), mesh, placements)
    return made


def equal_to_originals(found: dict[str, Any]) -> None:
    wholes = {"whole": WHOLE, "uneven": UNEVEN, "tiny": TINY, "some": WHOLE}
    for name, whole in wholes.items():
        assert torch.equal(found[name].full_tensor(), whole), name


def exchange(folder: str, mesh_shape: tuple[int, ...]) -> None:
    import torch.distributed.checkpoint as dcp

    label = "x".join(map(str, mesh_shape))
    ours, torchs = Path(folder) / f"ours{label}", Path(folder) / f"torchs{label}"
    save_sharded_state_dict({"model": dtensors(mesh_shape, filled=True), "step": 4}, ours)
    dcp.save({"model": dtensors(mesh_shape, filled=True), "step": 4}, checkpoint_id=torchs)


def read_both(folder: str, labels: list[str], mesh_shapes: list[tuple[int, ...]]) -> int:
    import torch.distributed.checkpoint as dcp

    count = 0
    for mesh_shape in mesh_shapes:
        for label in labels:
            mine = {"model": dtensors(mesh_shape, filled=False), "step": 0}
            loaded = load_sharded_state_dict(mine, Path(folder) / f"torchs{label}")
            equal_to_originals(loaded["model"])
            assert loaded["model"]["whole"] is mine["model"]["whole"]
            assert loaded["step"] == 4
            mine = {"model": dtensors(mesh_shape, filled=False), "step": 0}
            equal_to_originals(
                load_sharded_state_dict(mine, Path(folder) / f"ours{label}")["model"]
            )
            theirs = {"model": dtensors(mesh_shape, filled=False), "step": 0}
            dcp.load(theirs, checkpoint_id=Path(folder) / f"ours{label}")
            equal_to_originals(theirs["model"])
            assert theirs["step"] == 4
            count += 1
    return count


def exchange_and_read(folder: str, labels: list[str]) -> int:
    exchange(folder, (2, 2))
    return read_both(folder, labels, [(4,), (2, 2)])


def test_dtensors_travel_both_ways_between_meshes(tmp_path: Path) -> None:
    run_ranks(exchange, 2, str(tmp_path), (2,))
    labels = ["2", "2x2"]
    assert run_ranks(exchange_and_read, 4, str(tmp_path), labels, timeout_s=300) == [4] * 4
    assert run_ranks(read_both, 2, str(tmp_path), labels, [(2,)]) == [2] * 2
    assert not (tmp_path / "torchs2" / "manifest.json").exists()
    assert is_complete_checkpoint(tmp_path / "torchs2")
    assert len(list_checkpoints(tmp_path, pattern=".*")) == 4
    for label in ("ours2", "torchs2", "ours2x2", "torchs2x2"):
        targets = {
            name: make_sharded_tensor_for_checkpoint(torch.zeros_like(whole), f"model.{name}")
            for name, whole in {"whole": WHOLE, "uneven": UNEVEN, "tiny": TINY}.items()
        }
        loaded = load_sharded_state_dict(targets, tmp_path / label)
        assert torch.equal(loaded["whole"], WHOLE)
        assert torch.equal(loaded["uneven"], UNEVEN)
        assert torch.equal(loaded["tiny"], TINY)


def fsdp_model(rows: int, tensor_parallel_dtensor: bool, whole: torch.Tensor) -> Any:
    """A weight cut over tp and then by FSDP2 over dp, on a (dp=2, tp=2) mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp" if tensor_parallel_dtensor else "model")
    )
    part = mesh.get_group(1)
    module = torch.nn.Linear(3, rows, bias=True)
    if tensor_parallel_dtensor:
        weight = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    else:
        weight = whole.chunk(2)[mesh.get_local_rank(1)].clone()
    module.weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        module.bias.copy_(torch.arange(float(rows)))
    fully_shard(module, mesh=mesh["dp"])
    groups = {"tp_group": part, "dp_cp_group": mesh.get_group(0)}
    return {
        "weight": make_tp_sharded_tensor_for_checkpoint(module.weight, "weight", **groups),
        "bias": make_sharded_tensor_for_checkpoint(module.bias, "bias", **groups),
    }


def save_and_load_fsdp(folder: str) -> None:
    whole, uneven = torch.arange(24.0).reshape(8, 3), torch.arange(30.0).reshape(10, 3)
    for name, content, as_dtensor in (
        ("strided", whole, True),
        ("strided_uneven", uneven, True),
        ("composed", whole, False),
        ("composed_uneven", uneven, False),
    ):
        rows = len(content)
        path = Path(folder) / name
        save_sharded_state_dict(fsdp_model(rows, as_dtensor, content), path)
        for other in (True, False):
            target = fsdp_model(rows, other, torch.zeros(rows, 3))
            local = [target["weight"].data.to_local(), target["weight"].global_offset[0]]
            loaded = load_sharded_state_dict(target, path)
            assert loaded["weight"] is target["weight"].data
            start = local[1]
            assert torch.equal(local[0], content[start : start + len(local[0])]), (name, other)
            assert torch.equal(loaded["bias"].full_tensor(), torch.arange(float(rows)))


def test_fsdp2_over_tensor_parallelism_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(save_and_load_fsdp, 4, str(tmp_path), timeout_s=300)
    for name, rows in (
        ("strided", 8),
        ("strided_uneven", 10),
        ("composed", 8),
        ("composed_uneven", 10),
    ):
        target = make_sharded_tensor_for_checkpoint(torch.zeros(rows, 3), "weight")
        loaded = load_sharded_state_dict({"weight": target}, tmp_path / name, unexpected="ignore")
        assert torch.equal(loaded["weight"], torch.arange(rows * 3.0).reshape(rows, 3))


def planners_in_torchs_calls(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch import distributed as dist

    rank = dist.get_rank()
    group = {"tp_group": dist.group.WORLD}
    shard = make_tp_sharded_tensor_for_checkpoint(WHOLE.chunk(2)[rank], "w", **group)
    state = {"w": shard, "o": ShardedObject("o", rank, (2,), (rank,)), "n": {"lr": 0.5}}
    dcp.save(state, checkpoint_id=folder, planner=ShardedSavePlanner())
    target = make_tp_sharded_tensor_for_checkpoint(torch.zeros(3, 10), "w2", 1, **group)
    target = make_tp_sharded_tensor_for_checkpoint(torch.zeros(5, 3), "w", **group)
    planner = ShardedLoadPlanner()
    blank = {"w": target, "o": ShardedObject("o", None, (2,), (rank,)), "n": {"lr": 0.0}}
    dcp.load(blank, checkpoint_id=folder, planner=planner)
    texts = []
    for bad in (
        lambda: dcp.save(
            {"norm": ShardedTensor.from_rank_offsets("norm", torch.ones(3))},
            checkpoint_id=f"{folder}_bad",
            planner=ShardedSavePlanner(),
        ),
        lambda: dcp.load({"no": 1}, checkpoint_id=folder, planner=ShardedLoadPlanner()),
    ):
        try:
            bad()
        except dcp.CheckpointException as error:
            texts.append(str(error))
    return {"loaded": planner.loaded_state_dict(), "texts": texts}


def test_planners_work_in_torchs_own_calls(tmp_path: Path) -> None:
    results = run_ranks(planners_in_torchs_calls, 2, str(tmp_path / "a"))
    for rank, result in enumerate(results):
        assert torch.equal(result["loaded"]["w"], WHOLE.chunk(2)[rank])
        assert result["loaded"]["o"] == rank
        assert result["loaded"]["n"] == {"lr": 0.5}
        assert "ranks 0-1 write the same shard" in result["texts"][0]
        assert "'norm'" in result["texts"][0]
        assert "key 'no' is missing" in result["texts"][1]
    assert not (tmp_path / "a_bad" / ".metadata").exists()


def test_torch_reads_empty_tensors_and_scalars(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {
        "empty": make_sharded_tensor_for_checkpoint(torch.zeros(0, 4), "empty"),
        "scalar": make_sharded_tensor_for_checkpoint(torch.tensor(2.5), "scalar"),
        "plain": torch.zeros(0),
    }
    save_sharded_state_dict(state, tmp_path / "a")
    target = {"empty": torch.zeros(0, 4), "scalar": torch.zeros(()), "plain": torch.zeros(0)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=tmp_path / "a")
    assert target["scalar"] == 2.5
    loaded = load_sharded_state_dict(state, tmp_path / "a")
    assert loaded["empty"].shape == (0, 4)
    assert loaded["plain"].shape == (0,)


def test_torchs_checkpoint_of_plain_values_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {
        "a": torch.arange(4),
        "opt": {"groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "list": [1, [2, 3]]},
        "t": [torch.ones(2), 5],
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "torchs")
    save_sharded_state_dict(state, tmp_path / "ours")
    for name in ("torchs", "ours"):
        blank: dict[str, Any] = {
            "a": torch.zeros(4, dtype=torch.int64),
            "opt": {"groups": [{"lr": 0.0, "betas": (0, 0)}], "list": []},
            "t": [torch.zeros(2), 0],
        }
        loaded = load_sharded_state_dict(blank, tmp_path / name)
        assert torch.equal(loaded["a"], state["a"])
        assert loaded["opt"] == state["opt"]
        assert torch.equal(loaded["t"][0], torch.ones(2))
        assert loaded["t"][1] == 5
        assert loaded["a"] is blank["a"]


def test_saving_and_loading_alone_warns_of_nothing(tmp_path: Path) -> None:
    shard = make_sharded_tensor_for_checkpoint(torch.ones(3, requires_grad=True), "w")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_sharded_state_dict({"w": shard}, tmp_path / "a")
        load_sharded_state_dict({"w": shard}, tmp_path / "a")
    assert shard.data is not None
    assert shard.data.requires_grad
    assert shard.data.is_leaf
    assert sorted(os.listdir(tmp_path)) == ["a"]
