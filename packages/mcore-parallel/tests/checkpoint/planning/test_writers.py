"""Copies of one piece on several ranks: one writer, equal bytes, and nothing lost."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from rank_testing import run_ranks


class Block(nn.Module):
    """Layers that a tensor-parallel plan names, and others that it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)


def whole_model(seed: int) -> Block:
    torch.manual_seed(seed)
    return Block()


def two_dimensional(seed: int) -> nn.Module:
    """FSDP2 over two ranks and tensor parallelism over two, as torch's own tutorial does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = whole_model(seed)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except CheckpointingException as error:
        return str(error)
    return "no error"


def save_and_load_in_two_dimensions(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    rank, root = dist.get_rank(), Path(folder)
    model = two_dimensional(1)
    state: dict[str, Any] = {**model.state_dict(), "plain": torch.arange(3.0), "step": 4}
    if rank == 3:
        state["only here"] = torch.full((2,), 3.0)
    save_sharded_state_dict(state, root / "at once", check_replicas=True)
    save_sharded_state_dict(state, root / "behind", async_=True).result()
    other = two_dimensional(2)
    for path in (root / "at once", root / "behind"):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        load_sharded_state_dict(other.state_dict(), path, unexpected="ignore")
        for name, parameter in other.named_parameters():
            mine = dict(model.named_parameters())[name].to_local()
            assert torch.equal(parameter.to_local(), mine), name
    results = {}
    with torch.no_grad():
        if rank == 1:  # tp 1, dp 0: rank 0 holds the same rows of the norm
            model.norm.weight.to_local()[0] += 1
    results["copies that differ"] = refusal(save_sharded_state_dict, model.state_dict(), root / "a")
    results["other shapes"] = refusal(
        save_sharded_state_dict, {"stage": torch.zeros(2 + rank // 2)}, root / "b"
    )
    copy = torch.full((4,), float(rank == 2))
    shard = ShardedTensor.from_rank_offsets("w", copy, replica_id=rank)
    thing = ShardedObject("o", {"a": rank == 1}, (1,), (0,), replica_id=rank)
    for name, replicated in (("tensor", {"w": shard}), ("object", {"o": thing})):
        save_sharded_state_dict(replicated, root / f"unasked {name}")
        results[name] = refusal(
            save_sharded_state_dict, replicated, root / "c", check_replicas=True
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_sharded_state_dict({"lr": rank // 2, "same": 1}, root / "values")
    results["values, unasked"] = "".join(str(one.message) for one in caught if rank == 0)
    results["values"] = refusal(
        save_sharded_state_dict, {"lr": rank // 2, "same": 1}, root / "d", check_replicas=True
    )
    return results


WORDS = {
    "copies that differ": ["different bytes under one key", "'norm.weight', offset", "rank 0 and"],
    "other shapes": ["'stage': dtype float32 shape (2,) on rank 0", "shape (3,) on rank 2"],
    "tensor": ["'w', offset (0,) shape (4,): ranks 0-1, 3 and rank 2"],
    "object": ["'o/shard_0_1': ranks 0, 2-3 and rank 1"],
    "values": ["'lr': ranks 0-1 and ranks 2-3"],
}


def test_layers_that_a_plan_leaves_out_have_one_writer(tmp_path: Path) -> None:
    first, *others = run_ranks(save_and_load_in_two_dimensions, 4, str(tmp_path), timeout_s=300)
    assert "values outside" in first.pop("values, unasked")
    assert first.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert [word for word in words if word not in first[name]] == [], first[name]
        assert all(other[name] == first[name] for other in others)
    expected = whole_model(1).state_dict()
    for name in ("at once", "behind"):
        found = {key: torch.zeros_like(value) for key, value in expected.items()}
        extra = {"plain": torch.zeros(3), "step": 0, "only here": torch.zeros(2)}
        loaded = load_sharded_state_dict({**found, **extra}, tmp_path / name, unexpected="raise")
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        assert loaded["plain"].tolist() == [0, 1, 2]
        assert (loaded["step"], loaded["only here"].tolist()) == (4, [3, 3])
        theirs = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load(theirs, checkpoint_id=tmp_path / name, no_dist=True)
        assert torch.equal(theirs["head.weight"], expected["head.weight"])
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"at once", "behind", "unasked tensor", "unasked object", "values"}


def batch_norm_under_fsdp2(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        fully_shard(made)
        return made

    trained = model()
    for _ in range(3):
        trained(torch.arange(20.0).reshape(5, 4).sin())
    save_sharded_state_dict(trained.state_dict(), Path(folder) / "a")
    fresh = model()
    with torch.no_grad():
        fresh[0].weight.zero_()
    target = fresh.state_dict()
    load_sharded_state_dict(target, Path(folder) / "a", unexpected="raise")
    assert int(fresh[1].num_batches_tracked) == 3
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(fresh[1], name), getattr(trained[1], name))
    assert torch.equal(fresh[0].weight.full_tensor(), trained[0].weight.full_tensor())
    stock = model()
    dcp.load(stock.state_dict(), checkpoint_id=Path(folder) / "a")
    assert torch.equal(stock[1].running_mean, fresh[1].running_mean)


def test_running_statistics_beside_dtensors_are_filled(tmp_path: Path) -> None:
    run_ranks(batch_norm_under_fsdp2, 2, str(tmp_path))


class LeftError(BaseException):
    """What takes a rank away that the others still expect."""


def leave_before_the_first_background_save(folder: str) -> str:
    import datetime
    import os

    import torch.distributed as dist

    rank, new_group = int(os.environ["RANK"]), dist.new_group
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    of_the_world = datetime.timedelta(seconds=321)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=of_the_world)

    def leave(*args: Any, timeout: datetime.timedelta, **kwargs: Any) -> Any:
        if rank == 1:
            raise LeftError
        assert timeout == of_the_world
        return new_group(*args, timeout=datetime.timedelta(seconds=2), **kwargs)

    dist.new_group = leave
    try:
        state = {"w": torch.ones(3)}
        return refusal(save_sharded_state_dict, state, Path(folder) / "step_1", async_=True)
    except LeftError:
        return "left"


def test_a_rank_that_is_gone_before_the_background_group_exists(tmp_path: Path) -> None:
    """The others waited for half an hour, whatever the timeout of their group."""
    said, left = run_ranks(leave_before_the_first_background_save, 2, str(tmp_path), init=None)
    assert left == "left"
    assert "a participating rank cannot be reached" in said
    assert not (tmp_path / "step_1").exists()


def test_a_save_of_many_small_tensors_keeps_few_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects for the garbage collector to visit: five for each tensor while the tensors are
    written, and 21 at the end, cost one more full collection in each save of 5,000.
    """
    state = {f"w{number}": torch.ones(3) for number in range(1000)}
    save_sharded_state_dict(state, tmp_path / "imports are done")
    counts, sync = list[float](), os.fsync

    def count(descriptor: int) -> None:
        gc.collect()
        counts.append(len(gc.get_objects()) / len(state))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", count)
    gc.collect()
    gc.freeze()  # neither visits the objects of before
    save_sharded_state_dict(state, tmp_path / "saved")
    assert counts[0] < 3.5, "the file of the tensors"
    assert max(counts) < 17
