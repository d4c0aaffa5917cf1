"""Checkpoints that torch's converter reads, and the variant that Megatron-LM writes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from mcore.parallel.checkpoint import (
    ShardedObject,
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
    save_training_state,
)
from rank_testing import run_ranks


def converted(checkpoint: Path) -> Any:
    file = checkpoint.with_name("whole.pt")
    dcp_to_torch_save(checkpoint, file)
    return torch.load(file, weights_only=True)


def save_halves(folder: str) -> None:
    """Each rank has half of a tensor, a stage of its own, and one of two stacked layers."""
    rank = dist.get_rank()
    half = ShardedTensor.from_rank_offsets("model.w.half", torch.full((2,), rank), (0, rank, 2))
    stack = ShardedTensor.from_rank_offsets(
        "layers.weight", torch.full((2,), rank), (0, rank, 2), prepend_axis_num=1
    )
    state = {
        "model": {"w.half": half, f"stage.{rank}": torch.tensor(rank), f"layers.{rank}": stack},
        "list": [torch.ones(1), {"deep": [1, {"er": 2}]}],
        "own": ShardedObject("own", f"rank {rank}", (2,), (rank,)),
        "same": {"place": ShardedTensor.from_rank_offsets(f"key {rank}", torch.tensor(rank))},
        7: "a number as a key",
    }
    save_sharded_state_dict(state, folder)


def test_torchs_converter_gives_the_nested_dict(tmp_path: Path) -> None:
    run_ranks(save_halves, 2, str(tmp_path / "a"))
    found = converted(tmp_path / "a")
    stack = found.pop("layers.weight")  # no place of its own: two ranks name two places
    assert torch.equal(stack, torch.tensor([[0, 0], [1, 1]]))
    assert torch.equal(found["model"].pop("w.half"), torch.tensor([0, 0, 1, 1]))
    assert found == {
        "model": {"stage.0": torch.tensor(0), "stage.1": torch.tensor(1)},
        "list": [torch.ones(1), {"deep": [1, {"er": 2}]}],
        "own/shard_0_2": "rank 0",
        "own/shard_1_2": "rank 1",
        "key 0": torch.tensor(0),
        "key 1": torch.tensor(1),
        "7": "a number as a key",
    }


def test_a_converted_training_state_is_what_torch_loads(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}])
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    save_training_state(tmp_path / "a", model, optimizer, step=1, epoch={"number": 2})
    found = converted(tmp_path / "a")
    assert [found["step"], found["epoch"]] == [1, {"number": 2}]
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    fresh = torch.optim.AdamW(other[0].parameters())
    set_model_state_dict(other, found["model"])
    set_optimizer_state_dict(other, fresh, found["optimizer"])
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert fresh.param_groups[0]["lr"] == 0.5
    for mine, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[field], theirs[field]) for field in mine)


def test_an_index_with_plans_is_read_and_objects_that_megatron_lists(tmp_path: Path) -> None:
    """As megatron-core writes it; ``tests-integration/parity`` has checkpoints that it wrote."""
    path = tmp_path / "a"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.arange(3), "o/shard_0_1": [5]}, checkpoint_id=path)
    index = pickle.loads((path / ".metadata").read_bytes())
    items = [
        WriteItem(place, WriteItemType.BYTE_IO if place.fqn != "w" else WriteItemType.TENSOR)
        for place in index.storage_data
    ]
    index.all_local_plans = [SavePlan(items)]
    (path / ".metadata").write_bytes(pickle.dumps(index))
    for is_megatrons, expected in ((False, [5]), (True, 5)):
        if is_megatrons:
            (path / "metadata.json").write_text("{}")
        target = {"w": torch.zeros(3, dtype=torch.int64), "o": ShardedObject("o", None, (1,), (0,))}
        found = load_sharded_state_dict(target, path)
        assert [found["w"].tolist(), found["o"]] == [[0, 1, 2], expected]
