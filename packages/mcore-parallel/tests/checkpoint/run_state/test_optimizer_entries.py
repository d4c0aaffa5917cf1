"""Optimizers that keep state outside of ``optimizer.state[param]``: all of it comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.parallel.checkpoint import (
    CheckpointingException,
    load_training_state,
    save_training_state,
)
from mcore.parallel.checkpoint.files.index import read_index
from mcore.parallel.checkpoint.run_state.model_state import model_state
from mcore.parallel.checkpoint.run_state.optimizer_entries import find_entries
from rank_testing import run_ranks

Make = Callable[[torch.nn.Module], Any]


def net(seed: int = 0, device: torch.device | None = None) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return torch.nn.Sequential(*layers).to(device)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(batch.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step()


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def resumes(make: Make, path: Path, make_model: Callable[..., Any] = net) -> bool:
    """Return whether a fresh optimizer continues bit for bit after a save and a load."""
    model, other = make_model(), make_model(seed=1)
    optimizer, fresh = make(model), make(other)
    train(model, optimizer, range(3))
    save_training_state(path, model, optimizer, step=3)
    train(model, optimizer, range(3, 6))
    load_training_state(path, other, fresh, unexpected="raise")
    train(other, fresh, range(3, 6))
    return equal(model, other)


class Counting(SGD):
    """A rate that falls with a counter, which is only in the result of state_dict()."""

    count = 0

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Global(Counting):
    """The counter is an entry of the state that belongs to no parameter."""

    state_dict = SGD.state_dict
    load_state_dict = SGD.load_state_dict

    @property
    def count(self) -> Any:
        state: Any = self.state
        return state["global"]["count"] if "global" in state else 0

    @count.setter
    def count(self, value: int) -> None:
        state: Any = self.state
        state["global"] = {"count": value}


def hooked(model: torch.nn.Module) -> SGD:
    """The counter is added and taken back by torch's hooks."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = [0]

    def count(*_: Any) -> None:
        counts[0] += 1
        optimizer.param_groups[0]["weight_decay"] = 0.1 * counts[0]

    def take(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        counts[0] = state["count"]
        return {key: value for key, value in state.items() if key != "count"}

    optimizer.register_step_pre_hook(count)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "count": counts[0]})
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


class Wrapper(Optimizer):
    """Passes all calls to an inner optimizer, as torchtitan's container does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1)]
        super().__init__(list(model.parameters()), {})

    def step(self, closure: Any = None) -> Any:
        for one in self.optimizers:
            one.step()


@pytest.mark.parametrize("make", [Counting, Global, hooked, Wrapper])
def test_training_continues_bit_for_bit(make: Make, device: torch.device, tmp_path: Path) -> None:
    assert resumes(make, tmp_path / "a", partial(net, device=device))


def test_states_keep_their_dtype_beside_entries(tmp_path: Path) -> None:
    def half(seed: int = 0) -> torch.nn.Module:
        return net(seed).bfloat16()

    model, other = half(), half(1)
    optimizer, fresh = Counting(model), Counting(other)
    for value in model.parameters():
        optimizer.state[value]["momentum_buffer"] = torch.rand(value.shape, dtype=torch.float32)
    save_training_state(tmp_path / "a", model, optimizer, step=3)
    load_training_state(tmp_path / "a", other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert fresh.state[two]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(
            optimizer.state[one]["momentum_buffer"], fresh.state[two]["momentum_buffer"]
        )


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao_states_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    import torchao.optim

    def large(seed: int = 0) -> torch.nn.Module:  # smaller tensors stay in float32
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 1024), torch.nn.Linear(1024, 4))

    make = getattr(torchao.optim, name)
    model, other = large(), large(1)
    optimizer, fresh = make(model.parameters(), lr=1e-2), make(other.parameters(), lr=1e-2)
    with torch.compiler.set_stance("force_eager"):  # compiling its step takes most of a minute
        train(model, optimizer, range(2))
    save_training_state(tmp_path / "a", model, optimizer, step=2)
    load_training_state(tmp_path / "a", other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        for field, value in optimizer.state[one].items():
            loaded = fresh.state[two][field]
            assert type(loaded) is type(value)
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
            for part in inner:
                assert torch.equal(
                    getattr(loaded, part).view(torch.uint8), getattr(value, part).view(torch.uint8)
                )
            assert inner or torch.equal(loaded, value)
    assert equal(model, other)


class Slow(SGD):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": 3, "fast": super().state_dict()}


def with_field(model: torch.nn.Module) -> SGD:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def add(_: Optimizer, state: dict[str, Any]) -> None:
        state["state"] = {key: {**one, "slow": 1.0} for key, one in state["state"].items()}
        state["param_groups"][0]["phase"] = 2

    optimizer.register_state_dict_post_hook(add)
    return optimizer


class Sam(SGD):
    """A state of its own and an inner optimizer over the same parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.5)
        self.base = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.base.step()
        super().step()


def with_stranger(model: torch.nn.Module) -> SGD:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[torch.zeros(7)] = {"x": 1}
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Slow, r"optimizer Slow has entries(?s:.*)NAME=optimizer(?s:.*)- slow"),
        (with_field, r"SGD has entries(?s:.*)state\['0.weight'\]: slow(?s:.*)groups\[0\]: phase"),
        (Sam, r"optimizer Sam shares parameters with inner optimizers \(SGD\)"),
        (with_stranger, r"shape \(7,\) in no group"),
    ],
)
def test_entries_that_would_be_lost_are_refused(make: Make, text: str, tmp_path: Path) -> None:
    model = net()
    optimizer = make(model)
    train(model, optimizer, range(2))
    with pytest.raises(CheckpointingException, match=text):
        save_training_state(tmp_path / "a", model, optimizer, step=1)
    assert not list(tmp_path.iterdir())


def test_a_refused_optimizer_is_saved_as_an_extra_value(tmp_path: Path) -> None:
    model, other = net(), net(1)
    optimizer = Sam(model)
    train(model, optimizer, range(3))
    save_training_state(tmp_path / "a", model, step=3, outer=optimizer, inner=optimizer.base)
    train(model, optimizer, range(3, 6))
    fresh = Sam(other)
    load_training_state(tmp_path / "a", other, outer=fresh, inner=fresh.base)
    train(other, fresh, range(3, 6))
    assert equal(model, other)


class Shared(SGD):
    """Counts its steps in one tensor, which is in the state of every parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [value for group in self.param_groups for value in group["params"]]
        count = self.state[every[0]].setdefault("count", torch.zeros(()))
        count += 1
        for value in every:
            self.state[value]["count"] = count
            value.sub_(count)


def test_a_tensor_that_parameters_share_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Shared(model.parameters())
    optimizer.step()
    with pytest.raises(CheckpointingException, match=r"'weight\.count' and 'bias\.count'"):
        save_training_state(tmp_path / "a", model, optimizer, step=1)
    save_training_state(tmp_path / "b", model, step=1, own=optimizer)  # the remedy that it names
    other = torch.nn.Linear(2, 1)
    loaded = Shared(other.parameters())
    load_training_state(tmp_path / "b", other, own=loaded)
    optimizer.step()
    loaded.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
    assert loaded.state[other.weight]["count"] is loaded.state[other.bias]["count"]


def test_entries_that_cannot_be_given_back_are_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = Counting(model)
    save_training_state(tmp_path / "a", model, optimizer, step=1)
    plain = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointingException, match=r"SGD does not take(?s:.*)- count"):
        load_training_state(tmp_path / "a", model, plain)
    save_training_state(tmp_path / "b", model, plain, step=1)
    with pytest.raises(CheckpointingException, match=r"checkpoint has none.*strict=False"):
        load_training_state(tmp_path / "b", model, optimizer)
    load_training_state(tmp_path / "b", model, optimizer, strict=False)
    with pytest.raises(CheckpointingException, match=r"of 1 optimizers .* 2 are given"):
        load_training_state(
            tmp_path / "a",
            model,
            [SGD(one.parameters()) for one in (model[0], model[2])],  # type: ignore[index]
        )


def test_options_of_a_group_without_parameters_come_back(tmp_path: Path) -> None:
    def make(model: torch.nn.Module, rates: list[float]) -> SGD:
        values = [list(model.parameters()), [], []]
        groups = [{"params": p, "lr": lr} for p, lr in zip(values, rates, strict=True)]
        return SGD(groups, lr=0.1)

    model = net()
    save_training_state(tmp_path / "a", model, make(model, [1.0, 2.0, 3.0]), step=1)
    fresh = make(model, [0.0, 0.0, 0.0])
    load_training_state(tmp_path / "a", model, fresh)
    assert [group["lr"] for group in fresh.param_groups] == [1.0, 2.0, 3.0]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_comparison_reads_no_tensor() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    names = model_state(model).names
    with Operations() as operations:  # type: ignore[no-untyped-call]
        assert find_entries(optimizer, names) == {}
    assert operations.count == 0


def zero(folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: not in every rank

    def make(seed: int) -> tuple[torch.nn.Module, Any]:
        model = DistributedDataParallel(net(seed))
        groups = [
            {"params": list(model.parameters())[:2], "lr": 0.05},
            {"params": list(model.parameters())[2:]},
        ]
        return model, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2)

    model, optimizer = make(0)
    train(model, optimizer, range(3))
    save_training_state(folder / "zero", model, optimizer, step=3)
    keys = [key for key in read_index(folder / "zero").keys if key.startswith("optimizer.state.")]
    assert len(keys) == 4 * 3
    other, fresh = make(1)
    load_training_state(folder / "zero", other, fresh, unexpected="raise")
    plain = net(2)
    whole = torch.optim.AdamW(plain.parameters())
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert equal(model, other)
    assert len(fresh.optim.state) < 4  # each rank has its part
    whole = torch.optim.AdamW(
        [{"params": list(plain.parameters())[:2]}, {"params": list(plain.parameters())[2:]}]
    )
    load_training_state(folder / "zero", plain, whole, unexpected="raise")
    assert [group["lr"] for group in whole.param_groups] == [0.05, 1e-2]
    train(plain, whole, range(3, 6))
    assert equal(model, plain)


def test_zero_redundancy_optimizer_is_saved_from_all_ranks(tmp_path: Path) -> None:
    run_ranks(zero, 2, tmp_path)


class Local(SGD):
    """Plain values and lists in the state, of this rank alone if ``field`` asks for them."""

    def __init__(self, model: torch.nn.Module, field: str) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.field = field

    def step(self, closure: Any = None) -> Any:
        super().step()
        for value in self.param_groups[0]["params"]:
            state = self.state[value]
            if self.field == "nested":
                state["history"] = [value.grad.clone()]
            elif self.field == "differs":
                state["rank"] = dist.get_rank()
            else:
                state["seen"] = [1, 2]


def ranks_differ(folder: Path) -> None:
    for field, text in [
        ("nested", "DTensor in its field 'history'"),
        ("differs", r"differ between ranks(?s:.*)0.weight.rank"),
        ("equal", ""),
    ]:
        model = net()
        fully_shard(model)
        optimizer = Local(model, field)
        train(model, optimizer, range(1))
        if not text:
            save_training_state(folder / field, model, optimizer, step=1)
            continue
        with pytest.raises(CheckpointingException, match=text):
            save_training_state(folder / field, model, optimizer, step=1)
        assert not (folder / field).exists()


def test_states_of_one_rank_alone_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(ranks_differ, 2, tmp_path)


def entries_differ(folder: Path) -> None:
    rank = dist.get_rank()
    model = net()
    optimizer = Counting(model)
    optimizer.count = rank
    save_training_state(folder / "a", model, optimizer, step=1)
    fresh = Counting(model)
    load_training_state(folder / "a", model, fresh)
    assert fresh.count == rank
    # Entries on one rank alone: the others have none.
    other = Global(model)
    if rank == 1:
        other.count = 5
    save_training_state(folder / "b", model, other, step=1)
    again = Global(model)
    load_training_state(folder / "b", model, again)
    assert again.count == (5 if rank else 0)


def test_entries_that_differ_between_ranks_are_saved_for_each(tmp_path: Path) -> None:
    run_ranks(entries_differ, 2, tmp_path)
    model = net()
    with pytest.raises(CheckpointingException, match="saved for each of 2 ranks, and 1"):
        load_training_state(tmp_path / "a", model, Counting(model))
    load_training_state(tmp_path / "a", model, Counting(model), strict=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "other"),
    [(torch.optim.AdamW, torch.optim.SGD), (torch.optim.SGD, torch.optim.RMSprop)],
)
def test_an_optimizer_of_another_kind_is_refused_and_unchanged(
    saved: type[Optimizer], other: type[Optimizer], strict: bool, tmp_path: Path
) -> None:
    model = net()
    optimizer = saved(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    train(model, optimizer, range(2))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds an option
    save_training_state(tmp_path / "step_1", model, optimizer, step=1)

    present = other(model.parameters(), lr=0.5)  # type: ignore[call-arg]
    before = copy.deepcopy(present.state_dict())
    problem = f"another kind of optimizer than {other.__name__}"
    with pytest.raises(CheckpointingException, match=problem):
        load_training_state(tmp_path / "step_1", model, present, strict=strict)
    assert present.state_dict() == before
    load_training_state(tmp_path / "step_1", model, saved(model.parameters()))  # type: ignore[call-arg]
    load_training_state(tmp_path / "step_1", model, unexpected="ignore")
