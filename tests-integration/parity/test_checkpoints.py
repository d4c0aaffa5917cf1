"""Checkpoints of megatron-core's ``torch_dist`` format: theirs in ours, and ours in theirs."""

from __future__ import annotations

import json
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcore.parallel.checkpoint as ours
from mcore.parallel.checkpoint import load_sharded_state_dict, save_sharded_state_dict
from rank_testing import run_ranks

WHOLE = torch.arange(48.0).reshape(8, 6)
LAYERS = torch.arange(12.0).reshape(4, 3) + 100


def theirs() -> Any:
    """The package that saves and loads, told that there is a device."""
    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize = lambda: "cpu", lambda device=None: None
    return import_module("megatron.core.dist_checkpointing")


def state(library: Any, value: float | None = None) -> dict[str, Any]:
    """What a rank of two holds: rows, columns, stacked layers, a copy, an object of each rank."""
    rank = dist.get_rank()
    tensor, thing = library.ShardedTensor.from_rank_offsets, library.ShardedObject

    def mine(whole: torch.Tensor) -> torch.Tensor:
        return whole.clone() if value is None else torch.full_like(whole, value)

    return {
        "rows": tensor("rows", mine(WHOLE.chunk(2)[rank]), (0, rank, 2)),
        "columns": tensor("columns", mine(WHOLE.chunk(2, dim=1)[rank]), (1, rank, 2)),
        "norm": tensor("norm", mine(WHOLE[0]), replica_id=rank),
        "half": tensor("half", mine(WHOLE).bfloat16(), replica_id=rank),
        "layers": {
            str(layer): tensor(
                "layers", mine(LAYERS[layer]), (0, layer, len(LAYERS)), prepend_axis_num=1
            )
            for layer in range(2 * rank, 2 * rank + 2)
        },
        "rng": thing("rng", [f"state of {rank}"] if value is None else None, (2,), (rank,)),
    }


def save_theirs(folder: str) -> None:
    common = {"iteration": 7, "optimizer": {"param_groups": [{"lr": 0.5}]}}
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    theirs().save({**state(theirs()), **common}, folder)


def save_ours(folder: str) -> None:
    held = state(ours)
    held["rng"].data = [held["rng"].data]
    save_sharded_state_dict(held, folder)
    if dist.get_rank() == 0:
        described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        described |= {"common_backend": "torch", "common_backend_version": 1}
        (Path(folder) / "metadata.json").write_text(json.dumps(described))
        torch.save({"iteration": 7}, Path(folder) / "common.pt")
    dist.barrier()


def load_both(folder: str, library_name: str) -> dict[str, Any]:
    if library_name == "ours":
        return load_sharded_state_dict(state(ours, 0.0), folder)
    found: dict[str, Any] = theirs().load(state(theirs(), 0.0), folder)
    return found


def check(found: dict[str, Any], rank: int) -> None:
    assert torch.equal(found["rows"], WHOLE.chunk(2)[rank])
    assert torch.equal(found["columns"], WHOLE.chunk(2, dim=1)[rank])
    assert torch.equal(found["norm"], WHOLE[0])
    assert torch.equal(found["half"], WHOLE.bfloat16())
    assert found["rng"] == [f"state of {rank}"]
    for layer, value in found["layers"].items():
        assert torch.equal(value, LAYERS[int(layer)])


@pytest.mark.parametrize("library_name", ["ours", "theirs"])
def test_theirs_is_read_by_both(library_name: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    run_ranks(save_theirs, 2, str(path), timeout_s=600)
    for rank, found in enumerate(run_ranks(load_both, 2, str(path), library_name, timeout_s=600)):
        check(found, rank)
    assert ours.is_complete_checkpoint(path)
    blank = {
        "rows": torch.zeros(8, 6),
        "columns": torch.zeros(8, 6),
        "half": torch.zeros(8, 6),
        "layers": torch.zeros(4, 3),
    }
    load_sharded_state_dict(blank, path, unexpected="ignore")
    for name in ("rows", "columns", "half"):
        assert torch.equal(blank[name], WHOLE), name
    assert torch.equal(blank["layers"], LAYERS)
    rest = torch.load(path / "common.pt", weights_only=True)
    assert rest["iteration"] == 7


def test_ours_is_read_by_theirs_with_two_files_beside(tmp_path: Path) -> None:
    path = tmp_path / "ours"
    run_ranks(save_ours, 2, str(path), timeout_s=600)
    for rank, found in enumerate(run_ranks(load_both, 2, str(path), "theirs", timeout_s=600)):
        check(found, rank)
        assert found["iteration"] == 7
    assert ours.is_complete_checkpoint(path)
    for name in ("metadata.json", "common.pt"):
        (path / name).unlink()
    with pytest.raises(Exception, match="not a distributed checkpoint"):
        run_ranks(load_both, 2, str(path), "theirs", timeout_s=600)


def test_nothing_of_theirs_is_run(tmp_path: Path) -> None:
    """Their index holds the plans of the save; names beside those of torch's plans are refused."""
    path = tmp_path / "theirs"
    run_ranks(save_theirs, 2, str(path), timeout_s=600)
    content = (path / ".metadata").read_bytes()
    assert b"WriteItemType" in content
    (path / ".metadata").write_bytes(content.replace(b"WriteItemType", b"WriteItemTypf"))
    with pytest.raises(ours.DamagedCheckpointError, match=r"it refers to torch.*WriteItemTypf"):
        load_sharded_state_dict({}, path)
    (path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(ours.DamagedCheckpointError, match=r"it refers to builtins\.print"):
        load_sharded_state_dict({}, path)
