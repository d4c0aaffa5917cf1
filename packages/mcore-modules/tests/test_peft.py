"""Adapters of PEFT inside our modules."""

from types import SimpleNamespace

import pytest
import torch

from mcore.modules import Float16Module, MegatronModule

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
