import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mcore.modules import (
    Float16Module,
    MegatronModule,
    _freeze_parameter_if_present,
    freeze_parameters,
)
from mcore.modules import freeze_moe_router as freeze
from rank_testing import run_ranks


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
    caplog.set_level(logging.INFO, logger="mcore.modules.freezing")
    return caplog


def test_routing_parameters_are_frozen_and_others_are_not(log):
    model = Model(Sparse(), Dense())
    assert freeze(model) == [model]
    assert frozen(model.decoder.layers[0]) == FROZEN
    assert frozen(model.decoder.layers[1]) == set()
    assert [record.levelname for record in log.records] == ["INFO"]
    assert "froze 4 routing parameters of 1 chunks" in log.text
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


def test_what_has_no_router_is_passed_over_where_another_part_has_one():
    parts = [SimpleNamespace(mlp=None), None, SimpleNamespace(mlp=Sparse().mlp)]
    model = SimpleNamespace(decoder=SimpleNamespace(layers=parts), mtp=None)
    assert freeze([model, Model(Dense())])[0] is model
    assert not model.decoder.layers[2].mlp.router.weight.requires_grad


def test_gates_beside_experts_are_routers():
    block = torch.nn.ModuleDict(
        {name: torch.nn.Linear(4, 4) for name in ("gate", "shared_expert_gate", "experts")}
    )
    dense = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 4)})
    freeze(Model(block, dense))
    names = ("gate.weight", "gate.bias", "shared_expert_gate.weight", "shared_expert_gate.bias")
    assert frozen(block) == set(names)
    assert frozen(dense) == set()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_without_routers_is_warned_about_in_every_layout(stages, log):
    model = Model(Dense())
    model.config = SimpleNamespace(pipeline_model_parallel_size=stages)
    assert freeze(model) == [model]
    assert frozen(model) == set()
    [record] = [one for one in log.records if one.levelname == "WARNING"]
    assert record.getMessage() == "no module has a router or a gate_weight, so no router is frozen"


class Anything(torch.nn.Module):
    """A wrapper that no list knows."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Plain:
    def __init__(self, module):
        self.module = module


@pytest.mark.parametrize(
    "wrap", [Anything, Plain, torch.compile], ids=["module", "object", "compile"]
)
def test_routers_are_found_anywhere_inside_any_wrapper(wrap):
    hybrid = torch.nn.ModuleDict({"stack": torch.nn.Sequential(Dense(), Sparse())})
    hybrid.mtp = torch.nn.ModuleList([torch.nn.ModuleDict({"transformer_layer": Sparse()})])
    freeze(wrap(hybrid))
    assert frozen(hybrid.stack[1]) == FROZEN
    assert frozen(hybrid.mtp[0].transformer_layer) == FROZEN
    assert frozen(hybrid.stack[0]) == set()


def test_all_parameters_of_a_router_that_was_extended_are_frozen():
    layer = Sparse()
    layer.mlp.router = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    freeze(Model(layer))
    assert not any(parameter.requires_grad for parameter in layer.mlp.router.parameters())


@pytest.mark.parametrize("wrap", [list, Anything, Plain, torch.compile], ids=lambda w: w.__name__)
def test_parameters_are_frozen_by_name_through_wrappers(wrap, log):
    model = Model(Dense(), Dense())
    given = [model] if wrap is list else wrap(model)
    chunks = freeze_parameters(given, ["decoder.layers.0.*", "*.bias"])
    assert chunks is given or chunks == [given]
    assert frozen(model) == {
        "decoder.layers.0.mlp.weight",
        "decoder.layers.0.mlp.bias",
        "decoder.layers.1.mlp.bias",
    }
    assert "froze 3 parameters" in log.text


@pytest.mark.parametrize("patterns", ["layers.*", ["decoder.*", "decoder.layers.7.*"], []])
def test_a_pattern_without_a_match_is_an_error_and_freezes_nothing(patterns):
    model = Model(Dense())
    with pytest.raises(ValueError, match="matches no parameter"):
        freeze_parameters(model, patterns)
    assert frozen(model) == set()
    with pytest.raises(TypeError, match="a pattern is a int"):
        freeze_parameters(model, [1])


def look_for_what_is_not_there():
    """Whether a pattern without a match is refused, by the pipeline group of the model."""
    refused = []
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for group, stages in ((dist.group.WORLD, 1), (alone, 2)):
        model = Model(Dense())
        model.pg_collection = SimpleNamespace(pp=group)
        model.config = SimpleNamespace(pipeline_model_parallel_size=stages)
        try:
            freeze_parameters(model, "embedding.*")
        except ValueError:
            refused.append(True)
        else:
            refused.append(False)
    return refused


def test_a_pattern_may_match_on_another_stage_of_the_pipeline_group():
    assert run_ranks(look_for_what_is_not_there, 2) == [[False, True]] * 2


def test_a_model_with_a_child_called_module_has_both_spellings():
    model = torch.nn.ModuleDict({"head": Dense()})
    model.module = Dense()
    freeze_parameters(model, ["head.*", "module.mlp.bias", "mlp.weight"])
    assert all(not parameter.requires_grad for parameter in model.parameters())


def test_freezing_after_wrapping_is_warned_about(log):
    model = Model(Sparse())
    freeze(torch.nn.DataParallel(model))
    assert frozen(model.decoder.layers[0]) == FROZEN
    assert "Freeze before wrapping" in log.text


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


def test_patterns_are_for_names_without_activation_checkpointing():
    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    freeze_parameters(model, ["0.weight", "1.bias"])
    assert frozen(model) == {"0._checkpoint_wrapped_module.weight", "1.bias"}


def test_a_nested_expert_bias_is_not_frozen():
    layer = Sparse()
    layer.mlp.router.balance = torch.nn.Module()
    layer.mlp.router.balance.expert_bias = torch.nn.Parameter(torch.zeros(2))
    freeze(Model(layer))
    assert frozen(layer) == FROZEN
