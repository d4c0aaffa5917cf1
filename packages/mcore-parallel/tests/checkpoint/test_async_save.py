"""Background saves: what they write, in which order, and where their errors surface."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    SaveHandle,
    ShardedObject,
    ShardedTensor,
    is_complete_checkpoint,
    load_sharded_state_dict,
    load_training_state,
    make_tp_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
    save_training_state,
)
from mcore.parallel.checkpoint.planning import staging
from mcore.tensor.device import current_device
from rank_testing import preload, run_ranks
from rank_testing.scripts import run_script
from standin.plugin import NCCL

preload("torch.distributed.checkpoint")


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets(
            "w", torch.nn.Parameter(torch.full((4,), float(step))), replica_id=rank
        ),
        "o": ShardedObject("o", {"list": [step]}, (1,), (0,), replica_id=rank),
        "common": {"t": torch.tensor([step]), "list": [step]},
    }


def loaded(path: Path) -> dict[str, Any]:
    return load_sharded_state_dict(state_of(-1), path)


def check(path: Path, step: int) -> None:
    found = loaded(path)
    assert torch.equal(found["w"], torch.full((4,), float(step)))
    assert found["o"] == {"list": [step]}
    assert found["common"] == {"t": torch.tensor([step]), "list": [step]}


def scramble(state: dict[str, Any]) -> None:
    """Change in place everything that was handed to a save."""
    with torch.no_grad():
        state["w"].data.fill_(-5)
    state["o"].data["list"].append("changed")
    state["common"]["t"].fill_(-5)
    state["common"]["list"].append("changed")
    state["common"]["more"] = 1


class HeldBack:
    """Makes the background thread wait before it starts, so that changes always come first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        start = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            if thread.name.startswith("save-"):
                self.gate.wait()
            start(thread)

        monkeypatch.setattr(threading.Thread, "run", run)


@pytest.mark.usefixtures("on_each_device")
def test_later_changes_do_not_reach_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldBack(monkeypatch)
    state = state_of(3)
    handle = save_sharded_state_dict(state, tmp_path / "step_3", async_=True)
    assert isinstance(handle, SaveHandle)
    scramble(state)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="not finished after 0"):
        handle.result(0.01)
    assert not (tmp_path / "step_3").exists()
    held.gate.set()
    assert handle.result() == tmp_path / "step_3"
    handle.wait()
    assert handle.done()
    check(tmp_path / "step_3", 3)


@pytest.mark.usefixtures("on_each_device")
def test_saves_run_in_order_and_an_error_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = HeldBack(monkeypatch)
    first = save_sharded_state_dict(state_of(1), tmp_path / "a", async_=True)
    same = save_sharded_state_dict(state_of(2), tmp_path / "a", async_=True)
    third = save_sharded_state_dict(state_of(3), tmp_path / "b", async_=True)
    with caplog.at_level(logging.ERROR):
        held.gate.set()
        third.wait()
    assert first.done()
    assert same.done()
    first.result()
    with pytest.raises(CheckpointingException, match=r"cannot save .*a: .*by another program"):
        same.result()
    assert "asynchronous save" in caplog.text
    check(tmp_path / "a", 1)
    check(tmp_path / "b", 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]


def test_what_cannot_be_pickled_is_an_error_of_the_call(tmp_path: Path) -> None:
    state = {"o": ShardedObject("o", threading.Lock(), (1,), (0,))}
    with pytest.raises(CheckpointingException, match="'o/shard_0_1' of type lock cannot"):
        save_sharded_state_dict(state, tmp_path / "a", async_=True)
    assert list(tmp_path.iterdir()) == []


def busy_world(folder: str) -> list[str]:
    """Training continues over the same group while several saves are under way."""
    from torch import distributed as dist

    rank, root, device = dist.get_rank(), Path(folder), current_device()
    whole = torch.arange(200_000.0)
    handles = []
    for step in range(3):
        local = (whole + step).chunk(2)[rank].clone().to(device)
        shard = make_tp_sharded_tensor_for_checkpoint(local, "w", tp_group=dist.group.WORLD)
        state = {"w": shard, "step": step}
        handles.append(save_sharded_state_dict(state, root / f"step_{step}", async_=True))
        local.zero_()
        for number in range(200):
            total = torch.tensor([float(rank + number)], device=device)
            dist.all_reduce(total)
            assert total.item() == 2 * number + 1
    save_sharded_state_dict(state | {"w": shard}, root / "in_between")
    paths = [str(handle.result()) for handle in handles]
    for step in range(3):
        target = make_tp_sharded_tensor_for_checkpoint(
            torch.zeros(100_000, device=device), "w", tp_group=dist.group.WORLD
        )
        found = load_sharded_state_dict({"w": target, "step": None}, root / f"step_{step}")
        assert torch.equal(found["w"].cpu(), (whole + step).chunk(2)[rank])
        assert found["step"] == step
    return paths


def test_collectives_of_the_caller_do_not_mix_with_those_of_saves(
    tmp_path: Path, backend_of_ranks: str
) -> None:
    first, second = run_ranks(busy_world, 2, str(tmp_path), init=backend_of_ranks)
    assert first == second == [str(tmp_path / f"step_{step}") for step in range(3)]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_training_goes_on_on_a_device_while_saves_run(
    accelerator: torch.device,
    optimizer_class: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps change weights and moments in place. Each save has those of its call, without a wait.

    The pinned memory is small: it is reused while the device still writes to it.
    """
    monkeypatch.setattr(staging, "_ring", staging._PinnedRing(4096, 1024))
    model = torch.nn.Linear(40, 30).to(accelerator)
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.01)
    batch = torch.randn(8, 40).to(accelerator)
    handles, expected = [], []
    for step in range(4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        expected.append([tensor.detach().cpu() for tensor in model.parameters()])
        model(batch).square().mean().backward()  # is on its way while tensors are copied
        path = tmp_path / f"step_{step}"
        handles.append(save_training_state(path, model, optimizer, step=step, async_=True))
        for tensor in (*model.parameters(), *(one.grad for one in model.parameters())):
            tensor.detach().fill_(torch.nan)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), expected[-1], strict=True):
                parameter.copy_(value.to(accelerator))
                parameter.grad.zero_()
    for step, (handle, values) in enumerate(zip(handles, expected, strict=True)):
        handle.result()
        found = torch.nn.Linear(40, 30)
        load_training_state(tmp_path / f"step_{step}", found, unexpected="ignore")
        assert all(map(torch.equal, found.parameters(), values))


def test_a_world_that_is_bound_to_a_device_saves_in_the_background(
    accelerator: torch.device, tmp_path: Path
) -> None:
    from torch import distributed as dist

    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(NCCL, **alone, device_id=accelerator)
    try:
        with accelerator:
            save_sharded_state_dict(state_of(3), tmp_path / "a", async_=True).result()
            check(tmp_path / "a", 3)
    finally:
        dist.destroy_process_group()


SCRIPT = """
import sys, torch
from mcore.parallel.checkpoint import ShardedTensor, save_sharded_state_dict
shard = ShardedTensor.from_rank_offsets("w", torch.ones(1_000_000))
save_sharded_state_dict({"w": shard}, sys.argv[1], async_=True)
"""


def test_the_interpreter_waits_for_a_save_that_nobody_waits_for(tmp_path: Path) -> None:
    run_script(SCRIPT, str(tmp_path / "step_1")).check_returncode()
    assert is_complete_checkpoint(tmp_path / "step_1")


def fresh_world_after_another(folder: str) -> list[bool]:
    """A group that was made for the saves of one world is not used in the next."""
    from torch import distributed as dist

    done = []
    for world in range(2):
        rank = dist.get_rank()
        path = Path(folder) / f"step_{world}"
        handle = save_sharded_state_dict(state_of(world, rank), path, async_=True)
        done.append(handle.result() == path)
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        if world == 0:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2
            )
    return done


def test_world_that_is_initialised_again_gets_its_own_group(tmp_path: Path) -> None:
    assert run_ranks(fresh_world_after_another, 2, str(tmp_path)) == [[True, True]] * 2
    check(tmp_path / "step_1", 1)
