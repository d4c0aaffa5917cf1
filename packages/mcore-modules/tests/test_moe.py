import logging
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import Float16Module, MegatronModule, _freeze_parameter_if_present
from mcore.modules import freeze_moe_router as freeze


class Router(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.expert_bias = torch.nn.Parameter(torch.zeros(2))


class SharedExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_weight = torch.nn.Parameter(torch.zeros(1, 4))
        self.gate_bias = torch.nn.Parameter(torch.zeros(1))
        self.up = torch.nn.Linear(4, 4)


class Sparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.router = Router()
        self.mlp.shared_experts = SharedExperts()


class Dense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Linear(4, 4)


class Model(MegatronModule):
    def __init__(self, *layers):
        super().__init__(None)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(layers)


FROZEN = {
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.gate_bias",
}


def frozen(module):
    return {name for name, p in module.named_parameters() if not p.requires_grad}


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="mcore.modules.moe")
    return caplog


def test_routing_parameters_are_frozen_and_others_are_not(log):
    model = Model(Sparse(), Dense())
    assert freeze(model) == [model]
    assert frozen(model.decoder.layers[0]) == FROZEN
    assert frozen(model.decoder.layers[1]) == set()
    assert [record.levelname for record in log.records] == ["INFO"]
    assert "froze 4 " in log.text
    freeze(model)
    assert frozen(model.decoder.layers[0]) == FROZEN


def test_wrapped_models_are_looked_into_and_returned_as_given(log):
    model = Model(Sparse())
    wrapper = Float16Module(SimpleNamespace(bf16=True), model)
    chunks = [wrapper]
    assert freeze(chunks) is chunks
    assert frozen(model.decoder.layers[0]) == FROZEN
    assert all(record.levelname == "INFO" for record in log.records)


def test_language_models_and_multi_token_prediction_are_covered():
    model = Model(Dense())
    model.language_model = Model(Sparse())
    model.mtp = SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=Sparse())])
    freeze(model)
    assert frozen(model.language_model.decoder.layers[0]) == FROZEN
    assert frozen(model.mtp.layers[0].mtp_model_layer) == FROZEN


def test_missing_links_are_skipped(log):
    for model in (
        SimpleNamespace(),
        SimpleNamespace(decoder=None),
        SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(mlp=None), None])),
        SimpleNamespace(mtp=SimpleNamespace(layers=[SimpleNamespace()])),
        Model(Dense()),
    ):
        assert freeze(model) == [model]
    assert {record.levelname for record in log.records} == {"INFO"}


def test_routers_in_unknown_places_are_warned_about(log):
    model = torch.nn.ModuleDict({"encoder": Sparse()})
    freeze(model)
    assert frozen(model) == set()
    assert [r.levelname for r in log.records] == ["INFO", "WARNING"]
    assert "has a router" in log.text


def test_freezing_after_wrapping_is_warned_about(log):
    model = Model(Sparse())
    freeze(torch.nn.DataParallel(model))
    assert frozen(model.decoder.layers[0]) == FROZEN
    assert "freeze before wrapping" in log.text


def test_no_model_is_an_error():
    with pytest.raises(TypeError, match="None"):
        freeze(None)


def test_single_parameters():
    linear = torch.nn.Linear(1, 1, bias=False)
    assert _freeze_parameter_if_present(linear, "weight") is None
    assert not linear.weight.requires_grad
    _freeze_parameter_if_present(linear, "nope")
    _freeze_parameter_if_present(linear, "bias")
    _freeze_parameter_if_present(object(), "nope")
    with pytest.raises(TypeError, match=r"in_features of Linear is a int"):
        _freeze_parameter_if_present(linear, "in_features")
