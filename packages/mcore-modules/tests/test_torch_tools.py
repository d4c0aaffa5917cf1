"""torch.export, torch.compile and torch.func over our modules."""

from types import SimpleNamespace

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

from mcore.modules import Float16Module, LinearForLastLayer, MegatronModule

BF16 = SimpleNamespace(bf16=True)


class Model(MegatronModule):
    def __init__(self):
        super().__init__(BF16)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.linear(x) + self.shift


MAKERS = {
    "module": Model,
    "float16": lambda: Float16Module(BF16, Model()),
    "head": lambda: LinearForLastLayer(4, 1, False),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_exported_and_compiled_modules_give_the_same(make):
    model, x = make(), torch.randn(2, 4)
    expected = torch.utils._pytree.tree_leaves(model(x))[0]
    for strict in (True, False):
        exported = torch.export.export(model, (x,), strict=strict).module()
        assert torch.equal(torch.utils._pytree.tree_leaves(exported(x))[0], expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(torch.utils._pytree.tree_leaves(compiled(x))[0], expected, atol=1e-2)


def test_an_ensemble_equals_its_members():
    models = [Float16Module(BF16, Model()) for _ in range(3)]
    x = torch.randn(2, 4)
    state = stack_module_state(models)
    found = vmap(lambda *one: functional_call(models[0], one, (x,)))(*state)
    expected = torch.stack([model(x) for model in models])
    assert torch.allclose(found, expected, atol=2e-2)
