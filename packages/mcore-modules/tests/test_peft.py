"""Adapters of PEFT inside our modules."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mcore.modules import Float16Module, MegatronModule

pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it
BF16 = SimpleNamespace(bf16=True)


class Model(MegatronModule):
    def __init__(self):
        super().__init__(BF16)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("make", [Model, lambda: Float16Module(BF16, Model())])
def test_adapters_train_and_the_model_does_not(make):
    peft = pytest.importorskip("peft")  # an isolated installation has no other libraries
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["linear"]))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name.split(".")[-3] for name in trained} == {"lora_A", "lora_B"}
    before = {name: param.clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):  # lora_A gets a gradient once lora_B is no longer zero
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    changed = {n for n, param in model.named_parameters() if not torch.equal(param, before[n])}
    assert changed == trained


def make_adapted(seed, *, inject=False):
    """Return a model with random adapters, and a trained copy of its other module."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = Float16Module(BF16, torch.nn.Sequential(Model(), torch.nn.LayerNorm(4)))
    adapters = peft.LoraConfig(
        r=2, target_modules=["linear"], modules_to_save=["1"], init_lora_weights=False
    )
    if inject:
        return peft.inject_adapter_in_model(adapters, model)
    return peft.get_peft_model(model, adapters)


@pytest.mark.parametrize("inject", [False, True])
def test_saved_adapters_are_all_there_and_load(inject):
    model, other = make_adapted(0, inject=inject), make_adapted(1, inject=inject)
    peft = pytest.importorskip("peft")
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert len(saved) == 4  # two of LoRA, weight and bias of the trained norm
    x = torch.ones(2, 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" not in name and "modules_to_save" not in name:
                other.get_parameter(name).copy_(parameter)
    assert not torch.equal(other(x), model(x))
    assert peft.set_peft_model_state_dict(other, saved).unexpected_keys == []
    assert torch.equal(other(x), model(x))


def test_merged_adapters_leave_the_keys_of_the_wrapped_module():
    model = make_adapted(0)
    model.base_model.model.config = {}  # PEFT calls its get()
    merged = model.merge_and_unload()
    assert list(merged.state_dict()) == [
        *("0.linear.weight", "0.linear.bias"),
        *("1.weight", "1.bias"),
    ]


def test_state_and_optimizer_of_an_adapted_model_load_in_torch_checkpoints():
    model, other = make_adapted(0), make_adapted(1)
    optimizers = []
    for each in (model, other):
        trained = [param for param in each.parameters() if param.requires_grad]
        optimizers.append(torch.optim.AdamW(trained))
    model(torch.ones(2, 4)).sum().backward()
    optimizers[0].step()
    expected = copy.deepcopy(optimizers[0].state_dict())
    state, optimizer_state = get_state_dict(model, optimizers[0])
    set_state_dict(other, optimizers[1], model_state_dict=state, optim_state_dict=optimizer_state)
    assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))
    for index, values in expected["state"].items():
        found = optimizers[1].state_dict()["state"][index]
        assert torch.equal(found["exp_avg"], values["exp_avg"])


def test_a_copy_of_an_adapted_model_has_its_adapters():
    model = make_adapted(0)
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    with copied.disable_adapter():
        assert not torch.equal(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))
