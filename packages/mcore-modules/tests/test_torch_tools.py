"""torch.func over our modules. Other tools run over all public names in tests-integration."""

from types import SimpleNamespace

import torch
from torch.func import functional_call, stack_module_state, vmap

from mcore.modules import Float16Module, MegatronModule

BF16 = SimpleNamespace(bf16=True)


class Model(MegatronModule):
    def __init__(self):
        super().__init__(BF16)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.linear(x) + self.shift


def test_an_ensemble_equals_its_members():
    models = [Float16Module(BF16, Model()) for _ in range(3)]
    x = torch.randn(2, 4)
    state = stack_module_state(models)
    found = vmap(lambda *one: functional_call(models[0], one, (x,)))(*state)
    expected = torch.stack([model(x) for model in models])
    assert torch.allclose(found, expected, atol=2e-2)
