import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mcore.modules import GraphInputMismatch, GraphStateError
from mcore.modules.graphs import GraphSpec, TEGraphRunner, resolve_graph_runner
from mcore.parallel.rng import get_cuda_rng_tracker


def sample(*shape):
    return torch.ones(shape, requires_grad=True)


class FakeGraph:
    """Replays what it was given: the callable as it was at the capture."""

    def __init__(self, given, log):
        self.forward, self.log = given.forward, log

    def __call__(self, *args, is_first_microbatch=None, **kwargs):
        self.log.append(is_first_microbatch)
        return self.forward(*args, **kwargs)

    def reset(self):
        self.log.append("reset")

    def backward_dw(self):
        self.log.append("weight gradients")


def fake_module(name, **members):
    module = ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    return module


class Format:
    E4M3, HYBRID = "E4M3", "HYBRID"


class Recipe:
    def __init__(self, **options):
        self.options = options


RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")


def install(monkeypatch, recipes=RECIPES, **members):
    rng = []
    classes = {name: type(name, (Recipe,), {}) for name in recipes}
    modules = {
        "transformer_engine": fake_module("transformer_engine"),
        "transformer_engine.common": fake_module("common"),
        "transformer_engine.common.recipe": fake_module(
            "recipe", Format=Format, Recipe=Recipe, **classes
        ),
        "transformer_engine.pytorch": fake_module("pytorch", **members),
        "transformer_engine.pytorch.distributed": fake_module(
            "distributed", set_all_rng_states=rng.append
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return rng


@pytest.fixture
def new_te(monkeypatch):
    """A TransformerEngine with the newest names; keeps its calls and its graphs' calls."""
    calls, log = [], []

    def make_graphed_callables(
        modules,
        sample_args,
        num_warmup_iters=3,
        allow_unused_input=False,
        sample_kwargs=None,
        enabled=None,
        recipe=None,
        amax_reduction_group=None,
        cache_quantized_params=None,
        fp8_enabled=None,
        _order=None,
        _num_layers_per_chunk=None,
        retain_graph_in_backward=False,
        _reuse_graph_input_output_buffers=False,
    ):
        calls.append({name: value for name, value in locals().items() if name not in ("calls",)})
        assert all(isinstance(module, torch.nn.Module) for module in modules)
        for module, args, kwargs in zip(modules, sample_args, sample_kwargs, strict=True):
            module(*args, **kwargs)
        return tuple(FakeGraph(module, log) for module in modules)

    rng = install(monkeypatch, make_graphed_callables=make_graphed_callables)
    return SimpleNamespace(calls=calls, log=log, rng=rng)


def specs_of(layers, slots, kwargs=None):
    return [
        GraphSpec(layer, layer.forward, (sample(1, 2),), dict(kwargs or {}), slot, order)
        for slot in range(slots)
        for order, layer in enumerate(layers)
    ]


def test_each_slot_is_captured_in_one_call(new_te):
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    runner = TEGraphRunner(
        fp8_enabled=True,
        fp8_weight_caching=True,
        fp8_recipe="recipe",
        retain_graph_in_backward=True,
    )
    graphs = runner.capture(specs_of(layers, 2), num_warmup_iters=5)
    assert len(graphs) == 4
    for call in new_te.calls:
        given = [list(module.parameters()) for module in call["modules"]]
        assert given == [list(layer.parameters()) for layer in layers]
    first = new_te.calls[0]
    assert len(new_te.calls) == 2
    assert first["num_warmup_iters"] == 5
    assert first["allow_unused_input"] is True
    assert first["_order"] == [1, -1]
    assert first["_num_layers_per_chunk"] == [2]
    assert first["_reuse_graph_input_output_buffers"] is False
    assert (first["enabled"], first["cache_quantized_params"]) == (True, True)
    assert first["recipe"] == "recipe"
    assert first["retain_graph_in_backward"] is True
    assert first["fp8_enabled"] is None
    assert first["sample_kwargs"] == ({}, {})


def test_the_function_of_a_spec_is_captured_and_not_its_module(new_te):
    layer = torch.nn.Linear(2, 2)
    spec = GraphSpec(
        layer, lambda x, scale: layer(x) * scale, (sample(1, 2),), {"scale": sample(1)}
    )
    [graph] = TEGraphRunner().capture([spec])
    scale = torch.full((1,), 3.0, requires_grad=True)
    x = sample(1, 2)
    assert torch.equal(graph(x, scale=scale), layer(x) * 3)
    assert "forward" not in vars(layer)


def test_graphs_get_the_control_and_keep_the_contract(new_te):
    layer = torch.nn.Linear(2, 2)
    [graph] = TEGraphRunner().capture(specs_of([layer], 1))
    x = sample(1, 2)
    assert torch.equal(graph(x, is_first_microbatch=True, mask=None), layer(x))
    graph(x).sum().backward()
    assert new_te.log == [True, None]
    out = graph(x)
    with pytest.raises(GraphStateError, match="before the backward"):
        graph(x)
    out.sum().backward()
    with pytest.raises(GraphInputMismatch):
        graph(sample(2, 2))
    graph.backward_dw()
    graph.reset()
    graph.reset()
    assert graph.backward_dw is None
    assert new_te.log[3:] == ["weight gradients", "reset"]


def test_arguments_unknown_to_an_old_version_are_left_out(monkeypatch):
    calls = []

    def make_graphed_callables(
        modules, sample_args, num_warmup_iters=3, allow_unused_input=False, fp8_enabled=False
    ):
        calls.append(fp8_enabled)
        return tuple(modules)

    install(monkeypatch, make_graphed_callables=make_graphed_callables)
    layer = torch.nn.Linear(2, 2)
    runner = TEGraphRunner(fp8_enabled=True, fp8_weight_caching=True)
    [graph] = runner.capture(specs_of([layer], 1))
    assert calls == [True]
    assert torch.equal(graph(sample(1, 2)), layer(sample(1, 2)))
    with pytest.raises(RuntimeError, match="keyword inputs"):
        runner.capture(specs_of([layer], 1, {"mask": torch.ones(1)}))


def test_a_missing_or_too_old_te_names_the_extra(monkeypatch):
    layer = torch.nn.Linear(2, 2)
    install(monkeypatch)
    with pytest.raises(RuntimeError, match=r"no make_graphed_callables.*mcore-modules\[te\]"):
        TEGraphRunner().capture(specs_of([layer], 1))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(RuntimeError, match=r"cannot be imported.*mcore-modules\[te\]"):
        TEGraphRunner().capture(specs_of([layer], 1))


def test_it_needs_a_cuda_device(new_te):
    assert TEGraphRunner().is_available(torch.device("cpu")) is False


@pytest.fixture
def on_cuda(monkeypatch, new_te):
    """A device that TransformerEngine serves, as far as the choice of a runner goes."""
    monkeypatch.setattr(TEGraphRunner, "is_available", lambda self, device: True)
    layer = torch.nn.Linear(2, 2)

    def captured(**fields):
        config = SimpleNamespace(cuda_graph_impl="transformer_engine", **fields)
        resolve_graph_runner(config, torch.device("cuda", 0)).capture(specs_of([layer], 1))
        return new_te.calls[-1]

    return captured


@pytest.mark.parametrize("retained", [False, True])
def test_the_configuration_keeps_the_autograd_graph(on_cuda, retained):
    call = on_cuda(cuda_graph_retain_backward_graph=retained)
    assert call["retain_graph_in_backward"] is retained


@pytest.mark.parametrize(
    ("fields", "name", "options"),
    [
        ({"fp8": "e4m3"}, "DelayedScaling", {"fp8_format": "E4M3"}),
        ({"fp8": "hybrid"}, "DelayedScaling", {"fp8_format": "HYBRID"}),
        (
            {"fp8": "hybrid", "fp8_margin": 0, "fp8_amax_history_len": 16},
            "DelayedScaling",
            {"fp8_format": "HYBRID", "margin": 0, "amax_history_len": 16},
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
            "Float8CurrentScaling",
            {"fp8_format": "E4M3"},
        ),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "MXFP8BlockScaling", {"fp8_format": "E4M3"}),
        ({"fp4": "e2m1"}, "NVFP4BlockScaling", {}),
        ({"fp4": "e2m1", "fp8": "e4m3"}, "NVFP4BlockScaling", {}),
    ],
)
def test_the_recipe_is_that_of_the_configuration(on_cuda, fields, name, options):
    call = on_cuda(**fields)
    assert type(call["recipe"]).__name__ == name
    assert call["recipe"].options == options
    assert (call["enabled"], call["cache_quantized_params"]) == (True, True)


def test_a_recipe_object_of_te_is_passed_on_and_none_means_none(on_cuda):
    recipe = Recipe()
    assert on_cuda(quant_recipe=recipe)["recipe"] is recipe
    call = on_cuda(fp8=False)
    assert (call["recipe"], call["enabled"], call["cache_quantized_params"]) == (None, False, False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"quant_recipe": object()}, "quant_recipe=<object"),
        ({"use_kitchen": True}, "use_kitchen=True"),
        ({"fp8": "e5m2"}, "fp8='e5m2'"),
        ({"fp8": "e4m3", "fp8_recipe": "mine"}, "fp8_recipe='mine'"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "needs the recipe Float8BlockScaling"),
    ],
)
def test_what_would_be_captured_unquantised_is_refused(on_cuda, new_te, fields, text):
    with pytest.raises(ValueError, match=text):
        on_cuda(**fields)
    assert new_te.calls == []


def test_te_gets_the_generators_of_a_graph_safe_tracker_and_others_are_refused(new_te, seeded):
    class Drops(torch.nn.Linear):
        def forward(self, x):
            with get_cuda_rng_tracker().fork():
                return torch.nn.functional.dropout(super().forward(x))

    runner = TEGraphRunner()
    seeded(use_cudagraphable_rng=True)
    runner.capture(specs_of([Drops(2, 2)], 1))
    [states] = new_te.rng
    assert len(states) == 3
    assert all(isinstance(state, torch.Generator) for state in states.values())
    seeded()
    with pytest.raises(GraphStateError, match="use_cudagraphable_rng=True"):
        runner.capture(specs_of([Drops(2, 2)], 1))
    with get_cuda_rng_tracker().fork():  # as before the capture
        torch.rand(1)
