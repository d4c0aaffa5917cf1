"""Every kind of entry in checkpoints of megatron-core and back, on ranks in another layout."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mcore.modules import from_megatron_sharded_state_dict, to_megatron_sharded_state_dict
from mcore.parallel import ProcessGroups, get_pg_rank, get_pg_size
from mcore.parallel.checkpoint import (
    LocalNonpersistentObject,
    ShardedObject,
    load_sharded_state_dict,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
    sharded_state_dict_default,
)
from rank_testing import run_ranks

WHOLE = torch.arange(96.0).reshape(8, 12)
LAYERS = torch.arange(48.0).reshape(4, 4, 3) + 100
UNEVEN = torch.arange(15.0).reshape(5, 3) + 200
LAYOUTS = {
    "one": (1, {}),
    "tensor": (2, {"tp": 2}),
    "pipeline": (2, {"pp": 2}),
    "experts": (2, {"ep": 2}),
    "data": (2, {}),
}


def theirs() -> Any:
    """The package that saves and loads, told that there is a device."""
    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize = lambda: "cpu", lambda device=None: None
    return import_module("megatron.core.dist_checkpointing")


def pieces(layout: str) -> dict[str, torch.Tensor]:
    """The values that this rank holds, by the names of their entries."""
    groups = ProcessGroups.from_sizes(**LAYOUTS[layout][1])
    tp = get_pg_rank(groups.tp), get_pg_size(groups.tp)
    held = {"experts": LAYERS.chunk(get_pg_size(groups.ep))[get_pg_rank(groups.ep)]}
    held["layers"] = LAYERS.chunk(get_pg_size(groups.pp))[get_pg_rank(groups.pp)].chunk(tp[1], 1)[
        tp[0]
    ]
    if get_pg_rank(groups.pp) == 0:
        held |= {"rows": WHOLE.chunk(tp[1])[tp[0]], "columns": WHOLE.chunk(tp[1], 1)[tp[0]]}
        held |= {"norm": WHOLE[0], "module.weight": held["columns"], "module.bias": WHOLE[1]}
        held |= {"default.weight": WHOLE[2:4], "default.bias": WHOLE[4, :2]}
    return held


def describe(layout: str, *, blank: bool = False) -> dict[str, Any]:
    """The entries of this rank, made by every builder."""
    groups = ProcessGroups.from_sizes(**LAYOUTS[layout][1])
    given: dict[str, Any] = {"tp_group": groups.tp, "dp_cp_group": groups.dp_cp}
    held = {
        name: torch.zeros_like(value) if blank else value.clone()
        for name, value in pieces(layout).items()
    }
    stage, layers, experts = get_pg_rank(groups.pp), held["layers"], held["experts"]
    expert_replica = (0, get_pg_rank(groups.tp) + stage, get_pg_rank(groups.expt_dp))
    first_expert = len(experts) * get_pg_rank(groups.ep)
    found: dict[str, Any] = {
        "layers": [
            make_tp_sharded_tensor_for_checkpoint(
                layer, "layers", 0, prepend_offsets=((0, stage * len(layers) + place, 4),), **given
            )
            for place, layer in enumerate(layers)
        ],
        "experts": [
            make_sharded_tensor_for_checkpoint(
                expert, "experts", ((0, first_expert + place, 4),), expert_replica
            )
            for place, expert in enumerate(experts)
        ],
        "local": LocalNonpersistentObject(stage),
    }
    rows = UNEVEN.clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.zeros_like(rows) if blank else rows, mesh, [Shard(0)])
    found["uneven"] = make_sharded_tensor_for_checkpoint(sharded, "uneven", **given)
    if stage:
        return found
    linear = torch.nn.Linear(12, 2)
    linear.weight.data, linear.bias.data = held["default.weight"], held["default.bias"]
    module = {
        "weight": held["module.weight"], "bias": held["module.bias"],
        "_extra_state": None if blank else {"scale": 3},
    }  # fmt: skip
    tokens = None if blank else "state"
    return {
        **found,
        "rows": make_tp_sharded_tensor_for_checkpoint(held["rows"], "rows", 0, **given),
        "columns": make_tp_sharded_tensor_for_checkpoint(held["columns"], "columns", -1, **given),
        "norm": make_sharded_tensor_for_checkpoint(held["norm"], "norm", **given),
        "module": make_sharded_tensors_for_checkpoint(module, "module.", {"weight": 1}, **given),
        "default": sharded_state_dict_default(linear, "default.", metadata=given),
        "rng": make_sharded_object_for_checkpoint(tokens, "rng", ((1, 0, 1), (0, 0, 1)), **given),
    }


def list_objects(node: Any) -> None:
    """Put objects into lists of one, as Megatron stores them."""
    if isinstance(node, dict):
        for value in node.values():
            list_objects(value)
    elif isinstance(node, ShardedObject):
        node.data = [node.data]


def save(folder: str, layout: str, library: str) -> None:
    entries = describe(layout)
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    if library == "theirs":
        theirs().save(to_megatron_sharded_state_dict(entries), folder)
        return
    list_objects(entries)
    save_sharded_state_dict(entries, f"{folder}/whole")
    if dist.get_rank() == 0:
        described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        described |= {"common_backend": "torch", "common_backend_version": 1}
        (Path(folder) / "whole/metadata.json").write_text(json.dumps(described))
        torch.save({}, Path(folder) / "whole/common.pt")
    dist.barrier()


def load(folder: str, layout: str, library: str) -> None:
    """Load with the other library than that of the save, and compare every value."""
    entries = describe(layout, blank=True)
    if library == "ours":
        found = theirs().load(to_megatron_sharded_state_dict(entries), f"{folder}/whole")
    else:
        back = from_megatron_sharded_state_dict(to_megatron_sharded_state_dict(entries))
        found = load_sharded_state_dict(back, folder)
    assert found.pop("local") == entries["local"].unwrap()
    sharded = entries["uneven"].data
    assert isinstance(sharded, DTensor)
    local = found.pop("uneven")
    local = local.to_local() if isinstance(local, DTensor) else local
    assert torch.equal(local, UNEVEN.tensor_split([3])[dist.get_rank()] if dist.get_world_size() > 1
                       else UNEVEN)  # fmt: skip
    if "rng" in found:
        assert found.pop("rng") == "state"
        assert found["module"].pop("module._extra_state") == {"scale": 3}
    flat = {name: value for name, value in found.items() if name not in ("module", "default")}
    flat |= {**found.get("module", {}), **found.get("default", {})}
    expected = pieces(layout)
    assert flat.keys() == expected.keys()
    for name, value in expected.items():
        given = torch.stack(flat[name]) if isinstance(flat[name], list) else flat[name]
        assert torch.equal(given, value), name


@pytest.mark.parametrize("library", ["theirs", "ours"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tensor", "one"),
        ("one", "tensor"),
        ("pipeline", "tensor"),
        ("experts", "pipeline"),
        ("tensor", "experts"),
        ("data", "tensor"),
    ],
)
def test_entries_of_every_builder(library: str, saved: str, loaded: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(save, LAYOUTS[saved][0], folder, saved, library, timeout_s=600)
    run_ranks(load, LAYOUTS[loaded][0], folder, loaded, library, timeout_s=600)
