import copy
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from mcore.modules import Float16Module, MegatronModule, unwrap_model
from rank_testing import run_ranks

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

    def forward(self, x):
        return self.norm(self.module(x))


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
    # A wrapper of torch, whose keys contain its child.
    parent["child"].load_state_dict(torch.nn.DataParallel(Versioned(1, 1)).state_dict())
    assert seen == [7, 7]


def test_copies_in_a_parent_load_into_themselves():
    parent = torch.nn.ModuleDict({"child": Float16Module(BF16, torch.nn.Linear(1, 1))})
    copied = copy.deepcopy(parent)
    copied.load_state_dict({"child.weight": torch.full((1, 1), 5.0), "child.bias": torch.ones(1)})
    assert copied.child.module.weight.item() == 5.0
    assert parent.child.module.weight.item() != 5.0


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), batch_norm, Owner])
@pytest.mark.parametrize("place", [lambda m: m, lambda m: torch.nn.ModuleDict({"child": m})])
def test_distributed_checkpoint_sees_the_keys_of_the_wrapped_module(make, place):
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


class KeyRecorder(torch.nn.Module):
    """Has the keys ``own`` and records which keys it is to load."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        return dict.fromkeys((prefix + key for key in self.own), 0)

    def _load_from_state_dict(self, state_dict, prefix, *_):
        self.seen = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}


OWN = {"weight", "bias"}
OWN_WITH_MODULE = {"module.weight", "weight"}


@pytest.mark.parametrize("prefix", ["", "child."])
@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        (["weight", "bias"], OWN, {"weight", "bias"}),
        (["module.weight", "module.bias"], OWN, {"weight", "bias"}),
        (["weight", "unknown"], OWN, {"weight", "unknown"}),
        (["module.weight", "weight"], OWN_WITH_MODULE, {"module.weight", "weight"}),
        (["module.module.weight", "module.weight"], OWN_WITH_MODULE, {"module.weight", "weight"}),
        (["module.module.weight"], OWN, {"module.weight"}),
        (["module.weight"], OWN_WITH_MODULE, {"module.weight"}),
        ([], OWN, set()),
    ],
)
def test_keys_that_reach_the_wrapped_module(keys, own, expected, prefix):
    inside = KeyRecorder(own)
    model = Float16Module(BF16, inside)
    owner = torch.nn.ModuleDict({"child": model, "other": torch.nn.ReLU()}) if prefix else model
    owner.load_state_dict({prefix + key: 0 for key in keys}, strict=False)
    assert inside.seen == expected


def test_versions_are_renamed_with_the_keys():
    wrapper = torch.nn.Module()
    wrapper.module = batch_norm()
    state = wrapper.state_dict()
    # Without its version a batch norm would count batches from zero.
    del state["module.1.num_batches_tracked"]
    model = Float16Module(BF16, batch_norm())
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        model.load_state_dict(state)


def wrapped_with_optimizer(shard):
    torch.manual_seed(0)
    model = Float16Module(BF16, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    if shard:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def set_back(shard, flat, full):
    """State of a model and its optimizer after a step, set on others."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    model, optimizer = wrapped_with_optimizer(shard)
    model(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(unwrap_model(model), optimizer, options=options)
    other, other_optimizer = wrapped_with_optimizer(shard)
    set_state_dict(
        unwrap_model(other),
        other_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    before = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
    after = [entry["exp_avg"] for entry in other_optimizer.state_dict()["state"].values()]
    pairs = [*zip(before, after, strict=True)]
    pairs += zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    is_same = all(torch.equal(one, two) for one, two in pairs)
    return is_same, list(model_state), {key.split(".exp")[0] for key in optimizer_state}


@pytest.mark.parametrize("flat", [False, True])
def test_state_of_an_optimizer_can_be_set_back_by_torch(flat):
    is_same, names, keys = set_back(False, flat, False)
    assert is_same
    assert names[:2] == ["0.weight", "0.bias"]
    assert ("state.0.weight" in keys) is flat


@pytest.mark.parametrize(
    "wrap", [lambda m: m, torch.compile, lambda m: torch.nn.ModuleDict({"child": m})]
)
def test_state_of_an_optimizer_that_could_not_be_set_back_is_not_given(wrap):
    model, optimizer = wrapped_with_optimizer(False)
    outer = wrap(model)
    assert set_model_state_dict(outer, get_model_state_dict(outer)).missing_keys == []
    with pytest.raises(RuntimeError, match=r"get_state_dict\(unwrap_model\(model\), optimizer\)"):
        get_state_dict(outer, optimizer)
    assert get_state_dict(unwrap_model(model), optimizer)[1]["state"]


def set_back_on_ranks():
    # Flat and full at once fails in torch for any model.
    ways = ((False, False), (True, False), (False, True))
    return [set_back(True, flat, full)[0] for flat, full in ways]


def test_state_of_an_optimizer_of_a_sharded_model_can_be_set_back_by_torch():
    assert run_ranks(set_back_on_ranks, 2) == [[True] * 3] * 2


def set_back_below_fsdp1(make):
    """Whether a trained model and its optimizer are read back through FSDP1, in two ways."""

    def build():
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            make(), use_orig_params=True, device_id=torch.device("cpu")
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    bare = make()
    bare.load_state_dict(state)
    again, _ = build()
    again.load_state_dict(bare.state_dict())  # without the name of the child
    other, other_optimizer = build()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    set_state_dict(
        other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    moments = [
        [entry["exp_avg"] for entry in one.state_dict()["state"].values()]
        for one in (optimizer, other_optimizer)
    ]
    return all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(
            state.values(), again.state_dict().values(), other.state_dict().values(), strict=True
        )
    ) and all(map(torch.equal, *moments))


def below_fsdp1_on_ranks():
    return [
        set_back_below_fsdp1(lambda: Float16Module(BF16, torch.nn.Linear(2, 1))),
        set_back_below_fsdp1(lambda: Float16Module(BF16, Owner())),
    ]


def test_fsdp1_around_it_saves_and_loads():
    assert run_ranks(below_fsdp1_on_ranks, 2) == [[True] * 2] * 2


@pytest.mark.parametrize("make", [batch_norm, Owner])
def test_names_are_those_of_any_module(make):
    model = Float16Module(BF16, make())
    plain = torch.nn.Module()
    plain.module = model.module
    for method in ("named_parameters", "named_buffers", "named_modules"):
        found = dict(getattr(model, method)())
        assert list(found) == list(dict(getattr(plain, method)())), method
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
        assert model.get_submodule(name.rpartition(".")[0]).training
    assert all(model.get_buffer(name) is buffer for name, buffer in model.named_buffers())


def test_functional_call_uses_the_names_of_parameters():
    model = Float16Module(BF16, torch.nn.Linear(2, 1))
    doubled = {name: 2 * value for name, value in model.named_parameters()}
    x = torch.ones(3, 2)
    out = torch.func.functional_call(model, doubled, x)
    assert torch.allclose(out, 2 * model(x), rtol=1e-2)


def test_a_tensor_of_the_wrapped_module_is_not_set_on_the_wrapper():
    linear = torch.nn.Linear(2, 1, bias=False)
    linear.register_buffer("shift", torch.zeros(1))
    model = Float16Module(BF16, linear)
    weight = torch.full((1, 2), 2.0, dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match=r"Set it on \.module"):
        model.weight = torch.nn.Parameter(weight)
    with pytest.raises(AttributeError, match=r"'shift'.*Set it on \.module"):
        model.shift = torch.ones(1)
    with pytest.raises(AttributeError, match=r"module\.weight"):
        torch.func.functional_call(model, {"weight": weight}, torch.ones(1, 2))
    out = torch.func.functional_call(model, {"module.weight": weight}, torch.ones(1, 2))
    assert out.tolist() == [[4.0]]
