"""Save on one layout, load on any other: every value equals the unsharded original, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    is_complete_checkpoint,
    load_sharded_state_dict,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.tensor.device import current_device
from rank_testing import run_ranks

VOCABULARY, WIDTH, LAYERS = 10, 6, 3
UNEVEN_ROWS = {1: [8], 2: [5, 3], 4: [3, 0, 4, 1]}


def values(shape: tuple[int, ...], start: float, dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) / 7 + start).reshape(shape).to(dtype)


ORIGINALS = {
    "column": values((8, WIDTH), 1, torch.float32),
    "row": values((WIDTH, 8), 2, torch.float64),
    "norm": values((5,), 3, torch.float32),
    "layers": values((LAYERS, 4, 3), 4, torch.bfloat16),
    "scalar": values((), 5, torch.float32),
    "uneven": values((8, 3), 6, torch.float16),
    "flags": torch.arange(8) % 3 == 0,
    "counts": torch.arange(4) + 2**40,
    "embedding": values((VOCABULARY, 3), 7, torch.float32),
}


class Place:
    """A stand-in for a group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@dataclass(frozen=True)
class Layout:
    """Ranks of one tensor-parallel group are adjacent."""

    name: str
    tp: int
    dp: int

    @property
    def padded_vocabulary(self) -> int:
        multiple = 2 * self.tp
        return -(-VOCABULARY // multiple) * multiple


LAYOUTS = [Layout("tp1", 1, 1), Layout("tp2", 2, 1), Layout("dp2", 1, 2)]
LAYOUTS += [Layout("tp4", 4, 1), Layout("tp2dp2", 2, 2), Layout("dp4", 1, 4)]
ALONE = Layout("alone", 1, 1)


def padded(rows: int) -> torch.Tensor:
    """The embedding with rows of nines below it."""
    filling = torch.full((rows - VOCABULARY, 3), 9.0)
    return torch.cat([ORIGINALS["embedding"], filling])


def local_tensors(layout: Layout, tp_rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds, cut from the originals."""
    cut: dict[str, torch.Tensor] = {}
    cut["column"] = ORIGINALS["column"].chunk(layout.tp, 0)[tp_rank]
    cut["row"] = ORIGINALS["row"].chunk(layout.tp, 1)[tp_rank]
    for layer in range(LAYERS):
        cut[f"layer{layer}"] = ORIGINALS["layers"][layer].chunk(layout.tp, 0)[tp_rank]
    rows = UNEVEN_ROWS[layout.tp]
    cut["uneven"] = ORIGINALS["uneven"].split(rows)[tp_rank]
    cut["embedding"] = padded(layout.padded_vocabulary).chunk(layout.tp, 0)[tp_rank]
    for name in ("norm", "scalar", "flags", "counts"):
        cut[name] = ORIGINALS[name]
    return cut


def state_dict(
    layout: Layout, rank: int, make: Callable[[torch.Tensor], torch.Tensor], step: int
) -> dict[str, Any]:
    """A rank's state dict whose tensors are made from the cut originals."""
    tp_rank, dp_rank = rank % layout.tp, rank // layout.tp
    groups: dict[str, Any] = {
        "tp_group": Place(tp_rank, layout.tp),
        "dp_cp_group": Place(dp_rank, layout.dp),
    }
    local = {name: make(tensor) for name, tensor in local_tensors(layout, tp_rank).items()}

    def cut_over_tp(name: str, axis: int, **options: Any) -> ShardedTensor:
        return make_tp_sharded_tensor_for_checkpoint(
            local[name], f"model.{name}", axis, **groups, **options
        )

    model: dict[str, Any] = {
        "column": cut_over_tp("column", 0),
        "row": cut_over_tp("row", 1),
        "embedding": cut_over_tp("embedding", 0, allow_shape_mismatch=True),
    }
    for name in ("norm", "scalar", "flags", "counts"):
        model[name] = make_sharded_tensor_for_checkpoint(local[name], f"model.{name}", **groups)
    rows = UNEVEN_ROWS[layout.tp]
    model["uneven"] = ShardedTensor(
        key="model.uneven",
        data=local["uneven"],
        dtype=torch.float16,
        local_shape=(rows[tp_rank], 3),
        global_shape=(8, 3),
        global_offset=(sum(rows[:tp_rank]), 0),
        axis_fragmentations=None,
        replica_id=(0, 0, dp_rank),
    )
    layers = [
        make_tp_sharded_tensor_for_checkpoint(
            local[f"layer{layer}"], "model.layers", prepend_offsets=((0, layer, LAYERS),), **groups
        )
        for layer in range(LAYERS)
    ]
    rng = make_sharded_object_for_checkpoint({"seed": [1, step]}, "rng", **groups)
    return {
        "model": model,
        "layers": layers,
        "rng": rng,
        "rank_local": LocalNonpersistentObject(("local", rank)),
        "optimizer": {
            "state": {0: {"exp_avg": cut_over_tp("column", 0), "step": torch.tensor(float(step))}},
            "param_groups": [{"lr": 0.1 * step, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "step": step,
        "note": None,
        "history": [1.5, step],
    }


def with_optimizer_key(state: dict[str, Any]) -> dict[str, Any]:
    moment = state["optimizer"]["state"][0]["exp_avg"]
    moment.key = "optimizer.exp_avg"
    moment.data = moment.data.detach() * 2
    return state


def trained(tensor: torch.Tensor) -> torch.Tensor:
    """A live parameter where that is possible; views stay views."""
    tensor = tensor.to(current_device())
    return torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor


def filled_with_ones(tensor: torch.Tensor) -> torch.Tensor:
    """A target with different content and strides."""
    reverse = tuple(reversed(range(tensor.ndim)))
    return trained(torch.ones(tensor.shape[::-1], dtype=tensor.dtype).permute(reverse))


def random_states() -> list[bytes]:
    return [
        repr(random.getstate()).encode(),
        repr(np.random.get_state()).encode(),
        torch.get_rng_state().numpy().tobytes(),
    ]


def save_layout(root: str, layout: Layout, rank: int, async_: bool) -> None:
    state = with_optimizer_key(state_dict(layout, rank, trained, step=7))
    before = random_states()
    handle = save_sharded_state_dict(state, Path(root) / layout.name, async_=async_)
    if handle is not None:
        handle.wait()
    assert random_states() == before


def check_load(root: str, layout: Layout, rank: int, saved: Layout) -> None:
    state = with_optimizer_key(state_dict(layout, rank, filled_with_ones, step=0))
    loaded = load_sharded_state_dict(state, Path(root) / saved.name)
    expected = local_tensors(layout, rank % layout.tp)
    everything = padded(max(saved.padded_vocabulary, VOCABULARY))
    embedding = torch.zeros(layout.padded_vocabulary, 3)
    overlap = min(len(embedding), len(everything))
    embedding[:overlap] = everything[:overlap]
    expected["embedding"] = embedding.chunk(layout.tp, 0)[rank % layout.tp]
    assert list(loaded) == list(state)
    for name, shard in state["model"].items():
        assert loaded["model"][name] is shard.data, name
        assert torch.equal(shard.data.cpu(), expected[name]), name
    for layer, shard in enumerate(state["layers"]):
        assert loaded["layers"][layer] is shard.data
        assert torch.equal(shard.data.cpu(), expected[f"layer{layer}"])
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"].cpu(), expected["column"] * 2)
    assert torch.equal(loaded["optimizer"]["state"][0]["step"], torch.tensor(7.0))
    assert loaded["optimizer"]["param_groups"] == [
        {"lr": 0.1 * 7, "betas": (0.9, 0.95), "params": [0, 1]}
    ]
    assert loaded["rng"] == {"seed": [1, 7]}
    assert loaded["rank_local"] == ("local", rank)
    assert (loaded["step"], loaded["note"], loaded["history"]) == (7, None, [1.5, 7])
    assert state["step"] == 0


def save_all(root: str, layouts: list[Layout]) -> None:
    from torch import distributed as dist

    for layout in layouts:
        save_layout(root, layout, dist.get_rank(), async_=layout.name == "tp2dp2")


def load_all(root: str, layouts: list[Layout], saved: list[Layout]) -> int:
    from torch import distributed as dist

    checked = 0
    for layout in layouts:
        for other in saved:
            check_load(root, layout, dist.get_rank(), other)
            checked += 1
    return checked


def of_world(size: int) -> list[Layout]:
    return [layout for layout in LAYOUTS if layout.tp * layout.dp == size]


@pytest.fixture(scope="module")
def saved_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    save_layout(str(root), ALONE, 0, async_=False)
    for world in (1, 2, 4):
        run_ranks(save_all, world, str(root), of_world(world), timeout_s=300)
    return root


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_loads_every_other(saved_root: Path, world: int) -> None:
    saved = [ALONE, *LAYOUTS]
    assert all(is_complete_checkpoint(saved_root / layout.name) for layout in saved)
    mine = of_world(world)
    checked = run_ranks(load_all, world, str(saved_root), mine, saved, timeout_s=300)
    assert checked == [len(mine) * len(saved)] * world


def test_one_process_without_distributed_loads_every_layout(
    saved_root: Path, device: torch.device
) -> None:
    assert current_device() == device
    for saved in (ALONE, *LAYOUTS):
        check_load(str(saved_root), ALONE, 0, saved)


def save_and_load_on_devices(root: str, others: str) -> list[int]:
    mine = of_world(2)
    save_all(root, mine)
    return [load_all(root, mine, mine), load_all(others, mine, [ALONE, *LAYOUTS])]


def test_ranks_with_a_device_each_load_every_other_and_the_cpu_loads_theirs(
    saved_root: Path, accelerator: torch.device, tmp_path: Path
) -> None:
    group = f"{accelerator.type}:{accelerator.type}_nccl"
    roots = (str(tmp_path), str(saved_root))
    checked = run_ranks(save_and_load_on_devices, 2, *roots, init=group, timeout_s=300)
    assert checked == [[4, 14]] * 2
    for saved in of_world(2):
        check_load(str(tmp_path), ALONE, 0, saved)


def test_torch_reads_every_layout_into_whole_tensors(saved_root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for saved in (ALONE, *LAYOUTS):
        names = [name for name in ORIGINALS if name != "embedding"]
        whole = {f"model.{name}": torch.zeros_like(ORIGINALS[name]) for name in names}
        rows = saved.padded_vocabulary
        target: dict[str, Any] = {
            **whole,
            "model.embedding": torch.zeros(rows, 3),
            "optimizer": {"state": {0: {"step": torch.zeros(())}}, "param_groups": [{"lr": 0.0}]},
            "step": 0,
        }
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(target, checkpoint_id=saved_root / saved.name)
        for name in names:
            assert torch.equal(target[f"model.{name}"], ORIGINALS[name]), name
        assert torch.equal(target["model.embedding"], padded(rows))
        assert target["optimizer"]["state"][0]["step"] == 7
        assert target["optimizer"]["param_groups"] == [{"lr": 0.1 * 7}]
        assert target["step"] == 7


def columns_from_rows(root: str, save: bool) -> None:
    """The same tensor cut along another axis than it was saved along."""
    from torch import distributed as dist

    whole, rank = values((6, 4), 1, torch.float32), dist.get_rank()
    axis = 0 if save else 1
    local = whole.chunk(2, axis)[rank].clone().to(current_device())
    group = {"tp_group": dist.group.WORLD}
    if save:
        shard = make_tp_sharded_tensor_for_checkpoint(local, "w", axis, **group)
        save_sharded_state_dict({"w": shard}, Path(root) / "rows")
    else:
        zeros = torch.zeros(6, 2, device=current_device())
        target = make_tp_sharded_tensor_for_checkpoint(zeros, "w", axis, **group)
        loaded = load_sharded_state_dict({"w": target}, Path(root) / "rows")
        assert torch.equal(loaded["w"], local)


def rows_then_columns(root: str) -> None:
    columns_from_rows(root, save=True)
    columns_from_rows(root, save=False)


def test_rows_become_columns(tmp_path: Path, backend_of_ranks: str) -> None:
    run_ranks(rows_then_columns, 2, str(tmp_path), init=backend_of_ranks)


def subgroup_saves(root: str) -> list[str]:
    """Two halves of the world save and load on their own, at the same time."""
    from torch import distributed as dist

    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    mine, place = halves[rank % 2], rank // 2
    whole = values((4, 2), rank % 2, torch.float32)
    groups: dict[str, Any] = {"tp_group": mine, "replica_id": 0}
    path = Path(root) / f"half{rank % 2}"
    shard = make_tp_sharded_tensor_for_checkpoint(whole.chunk(2)[place].clone(), "w", **groups)
    save_sharded_state_dict({"w": shard}, path, process_group=mine)
    for _ in range(2):
        path = path.with_name(path.name + "_async")
        handle = save_sharded_state_dict({"w": shard}, path, process_group=mine, async_=True)
        assert handle.result() == path
    target = make_tp_sharded_tensor_for_checkpoint(torch.zeros(2, 2), "w", **groups)
    loaded = load_sharded_state_dict({"w": target}, path, process_group=mine)
    assert torch.equal(loaded["w"], whole.chunk(2)[place])
    try:
        save_sharded_state_dict({}, path, process_group=halves[1 - rank % 2])
    except ValueError as error:
        return [str(error)]
    return []


def test_process_groups_save_on_their_own(tmp_path: Path) -> None:
    results = run_ranks(subgroup_saves, 4, str(tmp_path))
    assert all("not a member" in text for [text] in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"half{half}{suffix}" for half in (0, 1) for suffix in ("", "_async", "_async_async")
    )


def save_and_load_without_numpy(root: str) -> list[float]:
    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Numpy is not available")  # what torch says where there is none

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", unavailable)
        rows = torch.arange(2.0) + 2 * dist.get_rank()
        shard = ShardedTensor.from_rank_offsets("w", rows, (0, dist.get_rank(), 2))
        thing = ShardedObject("thing", {"a": 1}, (1,), (0,), replica_id=dist.get_rank())
        save_sharded_state_dict({"w": shard, "thing": thing, "step": 3}, f"{root}/saved")
        whole = ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=dist.get_rank())
        return load_sharded_state_dict({"w": whole}, f"{root}/saved")["w"].tolist()


def test_ranks_save_and_load_without_numpy(tmp_path: Path) -> None:
    assert run_ranks(save_and_load_without_numpy, 2, str(tmp_path)) == [[0.0, 1.0, 2.0, 3.0]] * 2
