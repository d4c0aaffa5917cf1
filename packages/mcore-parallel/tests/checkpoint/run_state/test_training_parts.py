"""Training states of one process, against torch's own, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from mcore.parallel.checkpoint import (
    CheckpointingException,
    load_training_state,
    save_training_state,
)
from mcore.parallel.checkpoint.files.index import read_index
from mcore.parallel.checkpoint.run_state.model_state import model_state

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=2),
}


def net(seed: int = 0, device: torch.device | None = None) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    )
    return model.to(device)


def train(model: torch.nn.Module, optimizer: Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        batch = batch.to(next(model.parameters()).device)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_as_if_nothing_had_happened(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    model = net(device=device)
    optimizer = OPTIMIZERS[name](model.parameters())
    untouched = len(optimizer.state)  # only Adagrad has a state before its first step
    save_training_state(tmp_path / "step_0", model, optimizer, step=0)
    assert len(optimizer.state) == untouched  # torch's own way to look at it takes a step
    first = train(model, optimizer)
    save_training_state(tmp_path / "step_3", model, optimizer, step=3)
    expected = train(model, optimizer)
    other = net(seed=1, device=device)
    fresh = OPTIMIZERS[name](other.parameters())
    load_training_state(tmp_path / "step_3", other, fresh)
    assert train(other, fresh) == expected
    load_training_state(tmp_path / "step_3", model, optimizer)
    assert train(model, optimizer) == expected
    load_training_state(tmp_path / "step_0", model, optimizer)
    assert len(optimizer.state) == untouched
    assert train(model, optimizer) == first


@pytest.mark.parametrize("has_state", [True, False])
def test_a_state_of_a_device_goes_on_on_the_cpu_and_back(
    accelerator: torch.device, has_state: bool, tmp_path: Path
) -> None:
    """Each tensor of the state is where its optimizer has it, wherever it was saved."""
    cpu, losses = torch.device("cpu"), []
    for number, (saved_on, loaded_on) in enumerate(((accelerator, cpu), (cpu, accelerator))):
        model, other = net(device=saved_on), net(seed=1, device=loaded_on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.1, amsgrad=True)
        train(model, optimizer)
        save_training_state(tmp_path / f"{number}", model, optimizer, step=3)
        if has_state:
            train(other, fresh)
        load_training_state(tmp_path / f"{number}", other, fresh)
        states = [value for one in fresh.state.values() for value in one.items()]
        assert {v.device for name, v in states if name != "step"} == {loaded_on}
        assert {v.device for name, v in states if name == "step"} == {cpu}
        losses += [train(other, fresh), train(model, optimizer)]
    assert losses == [losses[0]] * 4


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("count", [3, 400_000])
def test_a_dict_of_tensors_is_filled_in_place_whatever_its_size(count: int, tmp_path: Path) -> None:
    model, value = net(), torch.arange(float(count))
    save_training_state(tmp_path / "a", model, step=1, ema={"b": value, "n": 2})
    target = torch.zeros(count, requires_grad=True)
    found = load_training_state(tmp_path / "a", model, ema={"b": target, "n": 0})["ema"]
    assert found["b"] is target
    assert torch.equal(target, value)
    assert found["n"] == 2
    other = load_training_state(tmp_path / "a", model, ema={"b": torch.zeros(2)})["ema"]["b"]
    assert other.device.type == "cpu"  # does not fit
    assert torch.equal(other, value.cpu())


def test_names_are_those_of_torch_without_what_wrappers_add(tmp_path: Path) -> None:
    inner = net()
    inner[3] = checkpoint_wrapper(torch.compile(inner[3], backend="eager"))
    model = torch.nn.DataParallel(torch.compile(inner, backend="eager"))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    train(inner, optimizer)
    save_training_state(tmp_path / "a", model, optimizer, step=3)
    plain = net()
    fresh = torch.optim.AdamW(plain.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(plain, fresh, options=options)
    expected = {f"optimizer.{name}" for name in states if name.startswith("state.")}
    expected |= {f"model.{name}" for name in get_model_state_dict(plain)}
    keys = set(read_index(tmp_path / "a").keys)
    assert keys == expected | {"step", "random_state/shard_0_1", "optimizer.param_groups"}
    load_training_state(tmp_path / "a", plain, fresh)
    assert train(plain, fresh) == train(inner, optimizer)


class Hiding(torch.nn.Module):
    """Its state dict has the keys of its child, as it declares, and values computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1, bias=False)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "module"}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"weight": self.module.weight + 0}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state)


def test_a_parameter_of_a_hidden_child_has_its_name_in_the_state_dict() -> None:
    model = Hiding()
    state = model_state(model)
    assert list(state.leaves) == ["weight"]
    assert state.names[model.module.weight] == ["weight"]


@pytest.mark.usefixtures("on_each_device")
def test_moments_keep_their_dtype_and_parameters_without_a_state_have_none(tmp_path: Path) -> None:
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model[3].weight
    assert isinstance(weight, torch.nn.Parameter)
    moments = {name: torch.rand(2, 5) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[weight] = {"step": torch.tensor(7.0), **moments}
    save_training_state(tmp_path / "a", model, optimizer, step=7)
    other = net(seed=1).bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    load_training_state(tmp_path / "a", other, fresh)
    assert list(fresh.state) == [other[3].weight]
    found = fresh.state[other[3].weight]  # type: ignore[index]
    assert found["step"] == 7
    for name, moment in moments.items():
        assert found[name].dtype == torch.float32  # torch's own load makes it bfloat16
        assert torch.equal(found[name], moment)


class Extra(torch.nn.Linear):
    """Has a state that is no tensor, and one that its state dict makes up."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.extra: Any = {"scales": [1.0]}
        self.shadow = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "shadow"] = self.shadow * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.shadow = state_dict.get(prefix + "shadow", self.shadow * 2) / 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.usefixtures("on_each_device")
def test_extra_states_and_made_up_tensors_reach_the_module(tmp_path: Path) -> None:
    model, other = Extra(), Extra()
    model.extra, model.shadow = {"scales": [2.0, {"amax": 3}]}, torch.tensor([3.0, 4.0])
    save_training_state(tmp_path / "a", [model], step=1, teacher=model)
    assert load_training_state(tmp_path / "a", other, teacher=other) == {
        "step": 1,
        "teacher": other,
    }
    assert other.extra == model.extra
    assert torch.equal(other.shadow, model.shadow)
    assert torch.equal(other.weight, model.weight)


class Renamed(torch.nn.Linear):
    """A layer whose state dict has halves of the weight, or, without a way back, none of it."""

    def __init__(self, keep: bool, join: bool = False) -> None:
        super().__init__(3, 4)
        self.keep = keep
        self.register_state_dict_post_hook(self.halve)
        if join:
            self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def halve(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        weight = state.pop(prefix + "weight")
        if module.keep:
            state[prefix + "top"], state[prefix + "end"] = weight.T.contiguous().T.chunk(2)

    @staticmethod
    def join(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        halves = [state.pop(prefix + key) for key in ("top", "end")]
        state[prefix + "weight"] = torch.cat(halves)


@pytest.mark.usefixtures("on_each_device")
def test_a_parameter_that_hooks_take_apart_is_itself_to_the_optimizer(tmp_path: Path) -> None:
    model, other = Renamed(keep=True, join=True), Renamed(keep=True, join=True)
    optimizer, fresh = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        save_training_state(tmp_path / "a", model, optimizer, step=1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    keys = set(read_index(tmp_path / "a").keys)
    expected = {f"optimizer.{name}" for name in states if name.startswith("state.")}
    assert {key for key in keys if key.startswith("optimizer.state")} == expected
    assert {key for key in keys if key.startswith("model")} == {
        "model.bias",
        "model.top",
        "model.end",
    }
    load_training_state(tmp_path / "a", other, fresh)
    assert torch.equal(other.weight, model.weight)
    for field, moment in optimizer.state[model.weight].items():
        assert torch.equal(fresh.state[other.weight][field], moment)

    one_way, dropped = Renamed(keep=True), Renamed(keep=False)
    with pytest.raises(CheckpointingException, match=r"does not take(?s:.*)'?top"):
        load_training_state(tmp_path / "a", one_way, unexpected="ignore")
    with pytest.raises(CheckpointingException, match=r"'weight', of which (?s:.*) not be saved"):
        save_training_state(
            tmp_path / "b", dropped, torch.optim.AdamW(dropped.parameters()), step=1
        )
    save_training_state(tmp_path / "b", dropped, torch.optim.AdamW([dropped.bias]), step=1)


@pytest.mark.usefixtures("on_each_device")
def test_options_follow_the_parameters_into_other_groups_and_optimizers(tmp_path: Path) -> None:
    model, other = net(), net(seed=1)
    optimizer = torch.optim.SGD(
        [
            {"params": model[3].parameters(), "lr": 0.3},
            {"params": model[0].parameters(), "lr": 0.2, "weight_decay": 0.1},
            {"params": model[1].parameters(), "lr": 0.3},
        ],
        foreach=True,
    )
    save_training_state(tmp_path / "a", model, optimizer, step=0)
    first = torch.optim.SGD(other[0].parameters(), lr=torch.tensor(9.0), foreach=False)
    last = torch.optim.SGD([*other[1].parameters(), *other[3].parameters()], lr=9.0)
    rate = first.param_groups[0]["lr"]
    load_training_state(tmp_path / "a", other, [first, last])
    assert rate is first.param_groups[0]["lr"]
    assert rate == torch.tensor(0.2)
    assert [first.param_groups[0][name] for name in ("weight_decay", "foreach")] == [0.1, False]
    assert [last.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.3, 0]
    mixed = torch.optim.SGD(other.parameters(), lr=9.0)
    with pytest.raises(CheckpointingException, match=r"'0\.weight' and '3\.weight'"):
        load_training_state(tmp_path / "a", other, mixed)


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = net()
    frozen = torch.optim.AdamW(model[0].parameters())
    train(model, frozen)
    save_training_state(tmp_path / "a", model, frozen, step=3)
    other = net(seed=1)
    every = torch.optim.AdamW(other.parameters(), amsgrad=True)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    cases: list[tuple[str, Callable[[], object]]] = [
        (
            "lacks parameters of this optimizer",
            lambda: load_training_state(tmp_path / "a", other, every),
        ),
        (
            "'sampler' is missing",
            lambda: load_training_state(tmp_path / "a", other, sampler=None),
        ),
        (
            "no parameter of the model",
            lambda: save_training_state(tmp_path / "b", other, foreign, step=1),
        ),
        (
            "'0.weight' is in two optimizers",
            lambda: save_training_state(tmp_path / "b", model, [frozen, frozen], step=1),
        ),
        (
            "must be a torch.optim.Optimizer",
            lambda: save_training_state(tmp_path / "b", model, "adam", step=1),  # type: ignore[arg-type]
        ),
        (
            "different tensors of one name",
            lambda: save_training_state(tmp_path / "b", [model, other], step=1),
        ),
        (
            "'verify' cannot be the name",
            lambda: save_training_state(tmp_path / "b", model, step=1, verify=3),
        ),
        (
            "load would refuse",
            lambda: save_training_state(tmp_path / "b", model, step=1, path_=tmp_path),
        ),
    ]
    for text, call in cases:
        with pytest.raises(CheckpointingException, match=text):
            call()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    load_training_state(tmp_path / "a", other, every, strict=False)
    assert len(every.state) == 2


def test_a_tied_parameter_takes_one_content_only(tmp_path: Path) -> None:
    def make(tied: bool) -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        if tied:
            model["b"].weight = model["a"].weight
        return model

    saved, model = make(tied=False), make(tied=True)
    before = model["a"].weight.clone()
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    saved["b"](saved["a"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    save_training_state(tmp_path / "differ", saved, optimizer, step=1, average=saved)
    with pytest.raises(CheckpointingException, match=r"different content.*\n.*model\.b\.weight"):
        load_training_state(tmp_path / "differ", model)
    assert torch.equal(model["a"].weight, before)
    with pytest.raises(CheckpointingException, match=r"- average\.b\.weight"):
        load_training_state(tmp_path / "differ", make(tied=False), average=model)
    load_training_state(tmp_path / "differ", model, exclude="model.b.weight")
    assert torch.equal(model["a"].weight, saved["a"].weight)
    with torch.no_grad():
        saved["b"].weight.copy_(saved["a"].weight)
    save_training_state(tmp_path / "equal", saved, optimizer, step=1)
    save_training_state(tmp_path / "last", saved, step=1)
    model = make(tied=True)
    load_training_state(tmp_path / "last", model)
    load_training_state(tmp_path / "equal", model)
    assert torch.equal(model["b"].weight, saved["a"].weight)


@pytest.mark.xdist_group("transformers")
def test_merged_adapters_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")  # an isolated installation has no other libraries
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model, other = (peft.get_peft_model(net(seed), config) for seed in range(2))
    batch = torch.ones(6, 4)
    expected = model.eval()(batch)
    save_training_state(tmp_path / "a", model, step=1)
    model.merge_adapter()
    for call in (
        lambda: save_training_state(tmp_path / "b", model, step=1),
        lambda: load_training_state(tmp_path / "a", model),
        lambda: save_training_state(tmp_path / "b", net(), step=1, average=model),
    ):
        with pytest.raises(CheckpointingException, match="unmerge_adapter"):
            call()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    load_training_state(tmp_path / "a", other)
    assert torch.equal(other.eval()(batch), expected)


@pytest.mark.usefixtures("on_each_device")
def test_random_streams_are_put_back_unless_they_are_not_wanted(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), torch.rand(3).tolist()]

    model = net()
    save_training_state(tmp_path / "a", model, step=1)
    expected = draw()
    load_training_state(tmp_path / "a", model)
    assert draw() == expected
    load_training_state(tmp_path / "a", model, random_state=False)
    assert draw() != expected


def test_parameters_that_are_gathered_late_are_saved_with_their_values(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    weight: Any = source.weight
    weight._ensure_param_ready_callback = lambda: setattr(weight, "data", torch.full((1, 1), 3.0))
    save_training_state(tmp_path / "step_1", source, step=1)
    load_training_state(tmp_path / "step_1", target)
    assert target.weight.item() == 3.0
