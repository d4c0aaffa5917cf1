"""Quantisation by torchao below a Float16Module."""

from types import SimpleNamespace

import pytest
import torch

from mcore.modules import Float16Module


def test_a_quantised_model_runs_and_loads():
    quantization = pytest.importorskip("torchao.quantization")  # absent in isolated installations

    def make(seed):
        torch.manual_seed(seed)
        model = Float16Module(SimpleNamespace(bf16=True), torch.nn.Linear(64, 64))
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model

    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 64)
    model, x = make(0), torch.ones(2, 64)
    assert type(model.module.weight) is not torch.nn.Parameter
    expected = exact(x)
    assert torch.allclose(model(x), expected, atol=0.05)
    other = make(1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert list(model.sharded_state_dict()) == ["weight", "bias"]
