import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mcore.modules import GraphInputMismatch
from mcore.modules.graphs import GraphSpec, TEGraphRunner


def sample(*shape):
    return torch.ones(shape, requires_grad=True)


class FakeGraph:
    def __init__(self, module, log):
        self.module, self.log = module, log

    def __call__(self, *args, **kwargs):
        self.log.append(kwargs)
        return self.module(*args)

    def reset(self):
        self.log.append("reset")


def install(monkeypatch, make_graphed_callables):
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.make_graphed_callables = make_graphed_callables
    package.pytorch = module
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)


@pytest.fixture
def new_te(monkeypatch):
    """A TransformerEngine with the newest names; returns its calls and its graphs' calls."""
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
        return tuple(FakeGraph(module, log) for module in modules)

    install(monkeypatch, make_graphed_callables)
    return SimpleNamespace(calls=calls, log=log)


def specs_of(layers, slots, kwargs=None):
    return [
        GraphSpec(layer, layer.forward, (sample(1, 2),), dict(kwargs or {}), slot, order)
        for slot in range(slots)
        for order, layer in enumerate(layers)
    ]


def test_each_slot_is_captured_in_one_call(new_te):
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    runner = TEGraphRunner(fp8_enabled=True, fp8_weight_caching=True, fp8_recipe="recipe")
    graphs = runner.capture(specs_of(layers, 2), num_warmup_iters=5)
    assert len(graphs) == 4
    assert [call["modules"] for call in new_te.calls] == [tuple(layers)] * 2
    first = new_te.calls[0]
    assert first["num_warmup_iters"] == 5
    assert first["allow_unused_input"] is True
    assert first["_order"] == [1, -1]
    assert first["_num_layers_per_chunk"] == [2]
    assert first["_reuse_graph_input_output_buffers"] is False
    assert (first["enabled"], first["cache_quantized_params"]) == (True, True)
    assert first["recipe"] == "recipe"
    assert first["fp8_enabled"] is None
    assert first["sample_kwargs"] == ({}, {})


def test_graphs_get_the_controls_and_keep_the_contract(new_te):
    layer = torch.nn.Linear(2, 2)
    [graph] = TEGraphRunner().capture(specs_of([layer], 1))
    x = sample(1, 2)
    assert torch.equal(graph(x, is_first_microbatch=True, mask=None), layer(x))
    graph(x, cuda_graph_stream="stream", cuda_graph_event="event")
    assert new_te.log == [
        {"is_first_microbatch": True},
        {"cuda_graph_stream": "stream", "cuda_graph_event": "event"},
    ]
    with pytest.raises(GraphInputMismatch):
        graph(sample(2, 2))
    graph.reset()
    graph.reset()
    assert new_te.log[2:] == ["reset"]


def test_arguments_unknown_to_an_old_version_are_left_out(monkeypatch):
    calls = []

    def make_graphed_callables(
        modules, sample_args, num_warmup_iters=3, allow_unused_input=False, fp8_enabled=False
    ):
        calls.append(fp8_enabled)
        return tuple(modules)

    install(monkeypatch, make_graphed_callables)
    layer = torch.nn.Linear(2, 2)
    runner = TEGraphRunner(fp8_enabled=True, fp8_weight_caching=True)
    [graph] = runner.capture(specs_of([layer], 1))
    assert calls == [True]
    assert torch.equal(graph(sample(1, 2)), layer(sample(1, 2)))
    with pytest.raises(RuntimeError, match="keyword inputs"):
        runner.capture(specs_of([layer], 1, {"mask": torch.ones(1)}))


def test_a_missing_te_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"mcore-modules\[te\]"):
        TEGraphRunner().capture(specs_of([layer], 1))


def test_it_needs_a_cuda_device(new_te):
    assert TEGraphRunner().is_available(torch.device("cpu")) is False
