"""Dicts of large tensors among the further values: written once, read into place if asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import load_training_state, save_training_state
from mcore.parallel.checkpoint.files.index import read_index
from rank_testing import run_ranks

COUNT = 300_000  # elements: more than a MiB


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
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
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
