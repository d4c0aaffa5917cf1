import copy
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    Float16Module,
    MegatronModule,
)
from mcore.modules.float16 import add_wrapper_to_keys, without_wrapper_in_keys

BF16 = SimpleNamespace(bf16=True)


class Recorder(MegatronModule):
    """Linear(2, 1) that records what it is called with."""

    def __init__(self, make_output=lambda logits: logits):
        super().__init__(None)
        self.linear = torch.nn.Linear(2, 1)
        self.make_output = make_output

    def forward(self, x, **kwargs):
        self.seen = {"x": x, **kwargs}
        return self.make_output(self.linear(x.to(self.linear.weight.dtype)))


def batch_norm():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


def test_keys_are_those_of_the_wrapped_module():
    module = batch_norm()
    model = Float16Module(BF16, module)
    assert model.state_dict().keys() == module.state_dict().keys()
    assert model.state_dict()._metadata == module.state_dict()._metadata
    assert list(model.state_dict(prefix="p.")) == [f"p.{key}" for key in module.state_dict()]
    weight = model.state_dict(keep_vars=True)["0.weight"]
    assert weight is module[0].weight
    destination = {"other": 1}
    assert model.state_dict(destination, "p.") is destination
    assert len(destination) == 1 + len(module.state_dict())


def test_save_checkpoint_is_delegated():
    class Saves(Recorder):
        def state_dict_for_save_checkpoint(self, prefix="", keep_vars=False):
            return {f"{prefix}own": keep_vars}

    model = Float16Module(BF16, Saves())
    assert model.state_dict_for_save_checkpoint("p.", True) == {"p.own": True}
    plain = Float16Module(BF16, torch.nn.Linear(1, 1))
    assert set(plain.state_dict_for_save_checkpoint("p.")) == {"p.weight", "p.bias"}


@pytest.mark.parametrize("spelling", ["", "module."])
def test_load_returns_missing_and_unexpected_keys(spelling):
    model = Float16Module(BF16, torch.nn.Linear(2, 1))
    state = {f"{spelling}weight": torch.full((1, 2), 3.0), f"{spelling}other": torch.ones(1)}
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["bias"]
    assert result.unexpected_keys == ["other"]
    assert model.module.weight.tolist() == [[3.0, 3.0]]
    with pytest.raises(RuntimeError, match="bias"):
        model.load_state_dict(state)


class Owner(torch.nn.Module):
    """Owns a child called ``module``, as a wrapper does."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), batch_norm, Owner])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spelling", ["own", "registered"])
def test_round_trip_inside_a_parent(make, depth, spelling):
    def parent():
        module = make()
        for _ in range(depth):
            module = Float16Module(BF16, module)
        return torch.nn.ModuleDict({"child": module, "other": torch.nn.Linear(1, 1)})

    source, target = parent(), parent()
    state = source.state_dict()
    if spelling == "registered":
        wrappers = "module." * depth
        state = {
            key.replace("child.", f"child.{wrappers}", 1): value for key, value in state.items()
        }
    result = target.load_state_dict(state)
    assert result == ([], [])
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_versions_of_modules_reach_them_through_a_parent():
    seen = []

    class Versioned(torch.nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    parent = torch.nn.ModuleDict({"child": Float16Module(BF16, Versioned(1, 1))})
    parent.load_state_dict(parent.state_dict())
    assert seen == [7]


def test_copies_in_a_parent_load_into_themselves():
    parent = torch.nn.ModuleDict({"child": Float16Module(BF16, torch.nn.Linear(1, 1))})
    copied = copy.deepcopy(parent)
    copied.load_state_dict({"child.weight": torch.full((1, 1), 5.0), "child.bias": torch.ones(1)})
    assert copied.child.module.weight.item() == 5.0
    assert parent.child.module.weight.item() != 5.0


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), batch_norm, Owner])
@pytest.mark.parametrize("place", [lambda m: m, lambda m: torch.nn.ModuleDict({"child": m})])
def test_distributed_checkpoint_sees_the_keys_of_the_wrapped_module(make, place):
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        set_model_state_dict,
    )

    model, other = (place(Float16Module(BF16, make())) for _ in range(2))
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(other, state)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_sharded_keys_are_those_of_the_wrapped_module():
    plain = Float16Module(BF16, torch.nn.Linear(2, 1))
    entries = plain.sharded_state_dict("m.", ((0, 1, 4),))
    assert set(entries) == {"m.weight", "m.bias"}
    assert entries["m.weight"].data is plain.module.weight
    assert entries["m.weight"].global_shape == (4, 1, 2)
    own = Float16Module(BF16, Recorder())
    assert set(own.sharded_state_dict(prefix="m.", metadata={"a": 1})) == {
        "m.linear.weight",
        "m.linear.bias",
    }


OWN = {"weight", "bias"}
OWN_WITH_MODULE = {"module.weight", "weight"}


def added(keys, own, prefix="child."):
    state = dict.fromkeys([prefix + key for key in keys] + ["other.weight"], 0)
    add_wrapper_to_keys(state, prefix, lambda: own)
    return set(state) - {"other.weight"}


@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        (["weight", "bias"], OWN, ["module.weight", "module.bias"]),
        (["module.weight", "module.bias"], OWN, ["module.weight", "module.bias"]),
        (["weight", "unknown"], OWN, ["module.weight", "module.unknown"]),
        (["module.weight", "weight"], OWN_WITH_MODULE, ["module.module.weight", "module.weight"]),
        (
            ["module.module.weight", "module.weight"],
            OWN_WITH_MODULE,
            ["module.module.weight", "module.weight"],
        ),
        (["module.module.weight"], OWN, ["module.module.weight"]),
        ([], OWN, []),
    ],
)
def test_keys_for_the_parent(keys, own, expected):
    assert added(keys, own) == {"child." + key for key in expected}


@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        (["weight", "bias"], OWN, ["weight", "bias"]),
        (["module.weight", "module.bias"], OWN, ["weight", "bias"]),
        (["module.weight", "weight"], OWN_WITH_MODULE, ["module.weight", "weight"]),
        (["module.module.weight", "module.weight"], OWN_WITH_MODULE, ["module.weight", "weight"]),
    ],
)
def test_keys_for_the_wrapped_module(keys, own, expected):
    assert list(without_wrapper_in_keys(dict.fromkeys(keys, 0), lambda: own)) == expected


def test_versions_are_renamed_with_the_keys():
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    state = without_wrapper_in_keys(wrapper.state_dict(), lambda: set(wrapper.module.state_dict()))
    assert state._metadata == wrapper.module.state_dict()._metadata


def test_keys_of_the_wrapped_module_are_asked_for_only_in_doubt():
    def fail():
        raise AssertionError("asked")

    state = {"child.weight": 0}
    add_wrapper_to_keys(state, "child.", fail)
    assert without_wrapper_in_keys(state, fail) is state
