"""Loads of a part of a checkpoint, under other names, and their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import (
    CheckpointingException,
    LoadReport,
    ShardedObject,
    ShardedTensor,
    load_sharded_state_dict,
    load_training_state,
    save_sharded_state_dict,
    save_training_state,
)
from rank_testing import run_ranks


def shards(value: float) -> dict[str, Any]:
    return {
        "a": ShardedTensor.from_rank_offsets("body.a", torch.full((3,), value)),
        "b": ShardedTensor.from_rank_offsets("body.b", torch.full((2,), value)),
        "head": {"w": torch.full((2,), value), "n": int(value)},
        "o": ShardedObject("o", [value], (1,), (0,)),
    }


ALL = {"body.a", "body.b", "head.w", "head.n", "o/shard_0_1"}


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("options", "loaded"),
    [
        ({}, ALL),
        ({"include": "body.a"}, {"body.a"}),
        ({"include": "body*"}, {"body.a", "body.b"}),
        ({"include": ["body.a", lambda key: key.endswith(".n")]}, {"body.a", "head.n"}),
        ({"exclude": "head.*"}, ALL - {"head.w", "head.n"}),
        ({"include": "head*", "exclude": ["head.w"]}, {"head.n"}),
        ({"include": "o/*"}, {"o/shard_0_1"}),
        ({"include": []}, set()),
    ],
)
def test_parts_by_key_start_and_function(
    options: dict[str, Any], loaded: set[str], tmp_path: Path
) -> None:
    save_sharded_state_dict(shards(1.0), tmp_path / "a")
    target, report = shards(7.0), LoadReport()
    found = load_sharded_state_dict(
        target, tmp_path / "a", unexpected="raise", report=report, **options
    )
    values = {
        "body.a": found["a"][0].item(),
        "body.b": found["b"][0].item(),
        "head.w": found["head"]["w"][0].item(),
        "head.n": found["head"]["n"],
        "o/shard_0_1": found["o"][0],
    }
    assert values == {key: 1.0 if key in loaded else 7.0 for key in ALL}
    assert report.loaded == {key: key for key in loaded}
    assert set(report.left) == set(report.unused) == ALL - loaded
    assert report.missing == []


@pytest.mark.usefixtures("on_each_device")
def test_other_names(tmp_path: Path) -> None:
    save_sharded_state_dict(shards(1.0), tmp_path / "a")
    target = {
        "x": ShardedTensor.from_rank_offsets("encoder.a", torch.zeros(3)),
        "y": ShardedTensor.from_rank_offsets("encoder.last.b", torch.zeros(2)),
        "n": 0,
        "new": 5,
    }
    names = {"encoder.*": "body.*", "encoder.last.*": "body.*", "n": "head.n"}
    report = LoadReport()
    with pytest.raises(CheckpointingException, match="key 'new' is missing"):
        load_sharded_state_dict(target, tmp_path / "a", rename=names, unexpected="ignore")
    found = load_sharded_state_dict(
        target, tmp_path / "a", rename=names, strict=False, unexpected="ignore", report=report
    )
    assert (found["x"].tolist(), found["y"].tolist(), found["n"], found["new"]) == (
        [1.0] * 3,
        [1.0] * 2,
        1,
        5,
    )
    assert report.loaded == {"encoder.a": "body.a", "encoder.last.b": "body.b", "n": "head.n"}
    assert report.missing == ["new"]
    assert set(report.unused) == {"head.w", "o/shard_0_1"}
    target = {"x": ShardedTensor.from_rank_offsets("a", torch.zeros(3))}
    load_sharded_state_dict(
        target, tmp_path / "a", rename=lambda key: f"body.{key}", unexpected="ignore"
    )
    assert target["x"].data.tolist() == [1.0] * 3
    with pytest.raises(CheckpointingException, match="include must have texts and functions"):
        load_sharded_state_dict(target, tmp_path / "a", include=[3])  # type: ignore[list-item]


def test_a_function_that_returns_no_name_is_refused(tmp_path: Path) -> None:
    save_sharded_state_dict(shards(1.0), tmp_path / "a")
    nothing: Any = {"body.a": "body.a"}.get  # forgets the other keys
    with pytest.raises(CheckpointingException, match=r"a text for 'body\.b', not None"):
        load_sharded_state_dict(shards(0.0), tmp_path / "a", rename=nothing)


class Net(torch.nn.Module):
    def __init__(self, seed: int, body: str = "body") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.add_module(body, torch.nn.Linear(3, 4))
        self.head = torch.nn.Linear(4, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for one in self.children():
            given = one(given)
        return given


def make(seed: int, body: str = "body") -> tuple[Any, torch.optim.AdamW]:
    model = Net(seed, body)
    groups = [
        {"params": [*next(model.children()).parameters()], "lr": 0.1 * (seed + 1)},
        {"params": [*model.head.parameters()], "lr": 0.2 * (seed + 1)},
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def copy(model: Any, optimizer: Any) -> dict[str, Any]:
    found = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        found[f"{name} moment"] = optimizer.state[value]["exp_avg"].clone()
    return found


def same(one: dict[str, Any], other: dict[str, Any], start: str) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if name.startswith(start))


@pytest.mark.usefixtures("on_each_device")
def test_a_training_state_in_part(tmp_path: Path) -> None:
    model, optimizer = make(0)
    save_training_state(tmp_path / "a", model, optimizer, step=4, note="x")
    saved = copy(model, optimizer)

    # Start from the weights alone, also with an optimizer at hand.
    other, fresh = make(1)
    before = copy(other, fresh)
    report = LoadReport()
    assert load_training_state(tmp_path / "a", other, fresh, include="model.*", report=report) == {}
    after = copy(other, fresh)
    assert all(torch.equal(after[name], saved[name]) for name in saved if "moment" not in name)
    assert all(torch.equal(after[name], before[name]) for name in before if "moment" in name)
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.4]
    assert set(report.loaded) == {f"model.{name}" for name, _ in model.named_parameters()}

    # All but the head, whose optimizer states and options stay too.
    other, fresh = make(1)
    found = load_training_state(
        tmp_path / "a", other, fresh, exclude="model.head.*", unexpected="raise"
    )
    assert found == {"step": 4, "note": "x"}
    after = copy(other, fresh)
    assert same(after, saved, "body")
    assert same(after, before, "head")
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.4]

    # Another model's names, in parameters and states.
    other, fresh = make(1, "encoder")
    found = load_training_state(
        tmp_path / "a", other, fresh, rename={"model.encoder.*": "model.body.*"}, unexpected="raise"
    )
    after = copy(other, fresh)
    assert all(torch.equal(after[name.replace("body", "encoder")], saved[name]) for name in saved)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]


def on_two_ranks(folder: str) -> Any:
    rank = dist.get_rank()
    given = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), 1.0 + rank), (0, rank, 2))}
    save_sharded_state_dict({**given, "n": 3}, Path(folder) / "a")
    target = {"w": ShardedTensor.from_rank_offsets("v", torch.zeros(2), (0, rank, 2)), "n": 0}
    report = LoadReport()
    found = load_sharded_state_dict(
        target, Path(folder) / "a", rename={"v": "w"}, exclude="n", report=report
    )
    return found["w"].tolist(), found["n"], report


def test_ranks_load_a_part_together(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert first == ([1.0, 1.0], 0, LoadReport({"v": "w"}, ["n"], [], ["n"]))
    assert second == ([2.0, 2.0], 0, LoadReport({"v": "w"}, ["n"], [], ["n"]))
