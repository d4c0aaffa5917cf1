"""Values that a load would refuse are refused by the save, with their key."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedObject,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


ODD: dict[str, Any] = {
    "numpy scalar": np.float64(0.5),
    "numpy array": np.arange(3),
    "numpy integer": np.int64(3),
    "path": PurePosixPath("/data"),
    "time": datetime.datetime(2026, 1, 1),
    "enum": Color.RED,
    "dataclass": Point(),
    "frozenset": frozenset({1}),
    "range": range(3),
    "deep inside": {"a": [1, (2, {"b": np.float32(1)})]},
}
GOOD: dict[str, Any] = {
    "numbers": [1, 2.5, 3j, True, None],
    "text": {"a": "b", 3: b"bytes"},
    "set": {1, 2},
    "tuple": (1, (2, [3])),
    "ordered": OrderedDict(a=1),
    "torch": {"size": torch.Size([1]), "dtype": torch.bfloat16, "device": torch.device("cpu")},
    "tensors": [[torch.arange(3)], {"b": torch.zeros(2, dtype=torch.bfloat16)}],
    "bytes": bytearray(b"abc"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_a_load_would_refuse_is_refused(name: str, tmp_path: Path) -> None:
    for key, state in (
        ("deep.value", {"deep": {"value": ODD[name]}}),
        ("o/shard_0_1", {"o": ShardedObject("o", ODD[name], (1,), (0,))}),
    ):
        if key == "deep.value" and name == "deep inside":
            key = "deep.value.a"
        for async_ in (False, True):
            with pytest.raises(CheckpointingException, match=f"'{key}' holds a .* load would"):
                save_sharded_state_dict(state, tmp_path / "a", async_=async_)
    assert list(tmp_path.iterdir()) == []
    save_sharded_state_dict(state, tmp_path / "a", weights_only=False)
    blank = {"o": ShardedObject("o", None, (1,), (0,))}
    found = load_sharded_state_dict(blank, tmp_path / "a", weights_only=False)["o"]
    assert str(found) == str(ODD[name])


@pytest.mark.parametrize("name", GOOD)
def test_what_a_load_takes_comes_back(name: str, tmp_path: Path) -> None:
    state = {"o": ShardedObject("o", GOOD[name], (1,), (0,)), "c": {"x": GOOD[name]}}
    save_sharded_state_dict(state, tmp_path / "a")
    blank = {"o": ShardedObject("o", None, (1,), (0,)), "c": {"x": GOOD[name]}}
    loaded = load_sharded_state_dict(blank, tmp_path / "a", unexpected="raise")
    assert str(loaded["o"]) == str(GOOD[name])
    if name != "ordered":  # a dict that is entered comes back as a plain one
        assert str(loaded["c"]["x"]) == str(GOOD[name])


class Wrapper(torch.Tensor):
    """A tensor that only its class understands."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_tensors_that_are_not_plain_memory_are_refused(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    wrapper = torch.ones(3).as_subclass(Wrapper)
    for bad, words in ((quantized, "dequantize"), (wrapper, "is a Wrapper"),
                       (torch.ones(3).to_sparse(), "make it dense")):  # fmt: skip
        for value in (bad, make_sharded_tensor_for_checkpoint(bad, "w")):
            with pytest.raises(CheckpointingException, match=f"'w' .*{words}"):
                save_sharded_state_dict({"w": value}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


class Named(torch.Tensor):
    """A plain tensor by another name."""


@pytest.mark.usefixtures("on_each_device")
def test_a_named_tensor_is_saved_as_plain_memory(tmp_path: Path) -> None:
    save_sharded_state_dict({"w": torch.ones(3).as_subclass(Named)}, tmp_path / "a")
    target = {"w": torch.zeros(3)}
    torch.distributed.checkpoint.load(target, checkpoint_id=tmp_path / "a", no_dist=True)
    assert target["w"].tolist() == [1, 1, 1]
