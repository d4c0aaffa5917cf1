"""Dicts of large tensors among the further values: written once, read into place if asked for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mcore.parallel.checkpoint import (
    load_sharded_state_dict,
    load_training_state,
    save_sharded_state_dict,
    save_training_state,
)
from mcore.parallel.checkpoint.files.index import read_index
from mcore.parallel.checkpoint.files.manifest import Index
from rank_testing import preload, run_ranks
from rank_testing.scripts import run_script

preload("torch.distributed.checkpoint")

COUNT = 700_000  # elements: more than two MiB, so that two ranks write parts


class Average:
    """An average of a model, whose state has tensors and plain values."""

    def __init__(self, value: float, *, is_empty: bool = False) -> None:
        self.shadow: dict[str, Any] = {} if is_empty else {"w": torch.full((COUNT,), value)}
        self.more: list[Any] = [] if is_empty else [torch.tensor([value]), {3: "three"}]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "more": self.more, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.more = state["shadow"], state["more"]


@pytest.mark.usefixtures("on_each_device")
def test_tensors_have_keys_and_are_read_into_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    ema = {"a": torch.rand(COUNT), "b": torch.rand(3, 2)}
    save_training_state(tmp_path / "a", model, step=1, ema=ema, average=Average(2.0), lr=0.5)
    keys = set(read_index(tmp_path / "a").keys)
    assert keys >= {"ema", "ema.a", "ema.b", "average.shadow.w", "average.more.0"}
    # Not asked for: not read, and no warning about it.
    assert load_training_state(tmp_path / "a", model, unexpected="raise") == {"step": 1, "lr": 0.5}

    target = {name: torch.zeros_like(value) for name, value in ema.items()}
    given = list(target.values())
    average = Average(0.0)
    shadow = average.shadow["w"]
    found = load_training_state(
        tmp_path / "a", model, unexpected="raise", ema=target, average=average
    )
    assert found["ema"].keys() == ema.keys()
    for value, loaded, one in zip(ema.values(), found["ema"].values(), given, strict=True):
        assert loaded is one
        assert torch.equal(one, value)
    assert average.shadow["w"] is shadow
    assert shadow.eq(2.0).all()
    # An object without any tensor yet gets all of its state.
    fresh = Average(0.0, is_empty=True)
    load_training_state(tmp_path / "a", model, ema=None, average=fresh)
    assert fresh.shadow["w"].eq(2.0).all()
    assert fresh.more == [torch.tensor([2.0], device="cpu"), {3: "three"}]


MEASURE = """
import sys, torch
from torch import nn
import mcore.parallel.checkpoint as ckpt
import mcore.parallel.checkpoint.files.reader
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(one for one in lines if one.startswith("VmHWM")).split()[1]) << 10
folder, model, size = sys.argv[1], nn.Linear(2, 1), 200 << 20
small = {"w": torch.ones(1 << 19)}
ckpt.save_training_state(folder + "/warm", model, step=1, ema=small)
ckpt.load_training_state(folder + "/warm", model, ema=small)
ema = {f"w{n}": torch.ones(size // 16) for n in range(4)}
before = peak()
ckpt.save_training_state(folder + "/a", model, step=1, ema=ema)
saved = peak()
ckpt.load_training_state(folder + "/a", model, ema=ema)
ckpt.load_training_state(folder + "/a", model)
print((saved - before) / size, (peak() - saved) / size)
"""


def test_the_memory_is_a_small_part_of_the_tensors(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of the memory is read from /proc")
    done = run_script(MEASURE, str(tmp_path))
    saved, loaded = map(float, done.stdout.split())
    assert saved < 0.05
    assert loaded < 0.05


def on_two_ranks(folder: str) -> None:
    rank, root = dist.get_rank(), Path(folder)
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    same = {"w": torch.arange(float(COUNT))}
    own = {"w": torch.full((COUNT,), float(rank)), "x": torch.zeros(2)}
    save_training_state(root / "a", model, step=1, same=same, own=own)
    targets = {name: torch.zeros(COUNT) for name in ("same", "own")}
    found = load_training_state(
        root / "a", model, unexpected="raise", same={"w": targets["same"]}, own={}
    )
    assert torch.equal(targets["same"], same["w"])
    assert torch.equal(found["own"]["w"], own["w"])
    assert torch.equal(found["own"]["x"], own["x"])


def test_tensors_that_differ_between_ranks_are_saved_for_each(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, str(tmp_path))
    keys = set(read_index(tmp_path / "a").keys)
    assert keys >= {"same.w", "own.w/shard_0_2", "own.w/shard_1_2", "own.x"}
    found = load_training_state(tmp_path / "a", torch.nn.Linear(2, 1), same={})
    assert torch.equal(found["same"]["w"], torch.arange(float(COUNT)))


def make_average() -> dict[str, torch.Tensor]:
    """Return 84 MB in shapes that are cut along their first, second or last axis, or not."""
    shapes = ((4096, 1024), (3, 1 << 20), (1, 1 << 22), (1 << 20,), (5,), (8, 64, 1 << 14))
    made = {}
    for number, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        made[f"w{number}"] = torch.arange(count, dtype=torch.float32).mul_(number + 1).view(shape)
    return {**made, "scalar": torch.tensor(2.0)}


def count_bytes(index: Index) -> list[int]:
    """Return the bytes of each file."""
    return [index.files.get(f"__{rank}_0.distcp", 0) for rank in range(3)]


def measure_peak(folder: str) -> float:
    """Return the memory that an asynchronous save needs, as a part of the size of its tensors."""

    def read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(one for one in lines if one.startswith(name)).split()[1]) << 10

    average = {"average": {**make_average(), "lr": 0.5}}
    save_sharded_state_dict(average, folder + "/warm", async_=True).result()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = read("VmRSS")
    save_sharded_state_dict(average, folder + "/a", async_=True).result()
    return (read("VmHWM") - before) / sum(one.nbytes for one in make_average().values())


def test_each_rank_copies_and_writes_its_share(tmp_path: Path) -> None:
    """The first rank wrote all, and copied all for an asynchronous save."""
    peaks = run_ranks(measure_peak, 3, str(tmp_path))
    assert max(peaks) < 1 / 3 + 0.1
    written = count_bytes(read_index(tmp_path / "a"))
    assert max(written) < 1.1 * sum(written) / 3
    expected = make_average()
    empty = {name: torch.zeros_like(one) for name, one in expected.items()}
    load_sharded_state_dict({"average": empty}, tmp_path / "a", unexpected="ignore")
    theirs = {"average": {name: torch.zeros_like(one) for name, one in expected.items()}}
    dcp.load(theirs, checkpoint_id=tmp_path / "a", no_dist=True)
    for name, one in expected.items():
        assert torch.equal(empty[name], one), name
        assert torch.equal(theirs["average"][name], one), name


def save_different_averages(folder: str) -> None:
    rank = dist.get_rank()
    large = {"same": torch.ones(2, 3 << 20), "own": torch.full((3 << 20,), float(rank))}
    if rank:
        large["later"] = torch.full((5 << 20,), 7.0)  # the first rank does not have it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_sharded_state_dict(large, folder + "/a")
    assert any("values outside" in str(one.message) for one in caught) == (rank == 0)


def test_tensors_that_some_ranks_have_or_that_differ_are_whole(tmp_path: Path) -> None:
    run_ranks(save_different_averages, 3, str(tmp_path))
    found = load_sharded_state_dict({"same": None, "own": None, "later": None}, tmp_path / "a")
    assert torch.equal(found["same"], torch.ones(2, 3 << 20))
    assert torch.equal(found["later"], torch.full((5 << 20,), 7.0))
    assert torch.equal(found["own"], torch.zeros(3 << 20))
    assert min(count_bytes(read_index(tmp_path / "a"))) > 10 << 20
