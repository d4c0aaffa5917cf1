import gc

import pytest
import torch

from mcore.modules import GraphInputMismatch, GraphStateError
from mcore.modules.graphs import EagerGraphRunner, GraphRunner, GraphSpec
from mcore.tensor import assert_viewless_tensor


def sample(*shape, **options):
    return torch.ones(shape, requires_grad=True, **options)


def graph_of(fn, *args, strict=True, **kwargs):
    spec = GraphSpec(torch.nn.Identity(), fn, args, kwargs)
    [graph] = EagerGraphRunner(strict=strict).capture([spec])
    return graph


def double(x, scale=None):
    return x * 2 if scale is None else x * scale


def test_it_is_a_runner_for_every_device():
    runner = EagerGraphRunner()
    assert isinstance(runner, GraphRunner)
    assert runner.name == "eager"
    assert runner.is_available(torch.device("cpu")) is True


def test_capture_runs_nothing_and_keeps_the_order_of_specs():
    calls = []
    specs = [
        GraphSpec(torch.nn.Identity(), lambda x, n=n: calls.append(n), (sample(1),), {}, m, n)
        for m in range(2)
        for n in range(2)
    ]
    graphs = EagerGraphRunner().capture(specs, num_warmup_iters=11)
    assert calls == []
    for graph in graphs:
        graph(sample(1))
    assert calls == [0, 1, 0, 1]


def test_every_difference_from_the_sample_is_listed():
    graph = graph_of(double, sample(2, 3), scale=torch.ones(1))
    with pytest.raises(GraphInputMismatch) as caught:
        graph(torch.ones(2, 4, dtype=torch.float64), other=torch.ones(1))
    text = str(caught.value)
    for part in (
        "input 'scale' is missing",
        "input 'other' is unexpected",
        "shape is (2, 4), captured with (2, 3)",
        "dtype is torch.float64, captured with torch.float32",
    ):
        assert part in text
    with pytest.raises(GraphInputMismatch, match="device is meta, captured with cpu"):
        graph(sample(2, 3, device="meta"), scale=torch.ones(1))
    with pytest.raises(GraphInputMismatch, match="input 1 is unexpected"):
        graph(sample(2, 3), sample(2, 3), scale=torch.ones(1))


def test_a_keyword_that_is_none_counts_as_absent():
    graph = graph_of(double, sample(2))
    assert graph(sample(2), scale=None, is_first_microbatch=True).tolist() == [2.0, 2.0]


def test_relaxed_graphs_compare_shapes_but_not_requires_grad():
    graph = graph_of(double, sample(2), strict=False)
    assert graph(torch.ones(2)).tolist() == [2.0, 2.0]
    held = [graph(sample(2)), graph(sample(2))]
    assert len(held) == 2
    with pytest.raises(GraphInputMismatch):
        graph(sample(3))


def test_second_forward_before_backward_is_refused():
    graph = graph_of(double, sample(2))
    out = graph(sample(2))
    assert graph.is_busy
    with pytest.raises(GraphStateError, match="before the backward"):
        graph(sample(2))
    with torch.no_grad(), pytest.raises(GraphStateError):
        graph(sample(2))
    out.sum().backward()
    assert not graph.is_busy
    graph(sample(2))


def test_dropped_outputs_free_the_graph():
    graph = graph_of(double, sample(2))
    out = graph(sample(2))
    loss = (out * 3).sum()
    del out
    assert graph.is_busy
    del loss
    gc.collect()
    assert not graph.is_busy


def test_an_exception_after_the_forward_frees_the_graph():
    graph = graph_of(double, sample(2))

    def step():
        out = graph(sample(2))
        raise ArithmeticError(out.shape)

    with pytest.raises(ArithmeticError):
        step()
    gc.collect()
    assert not graph.is_busy


def test_calls_without_gradients_are_not_tracked():
    graph = graph_of(double, sample(2))
    with torch.no_grad():
        held = [graph(sample(2)), graph(sample(2))]
    assert len(held) == 2


def test_outputs_may_be_nested_and_the_first_with_gradient_is_watched():
    graph = graph_of(lambda x: {"a": x.detach(), "b": (x * 2, x * 3)}, sample(2))
    out = graph(sample(2))
    assert type(out["b"]) is tuple
    assert graph.is_busy
    out["b"][0].sum().backward()
    assert not graph.is_busy


def test_watched_outputs_are_no_views():
    graph = graph_of(double, sample(2))
    out = graph(sample(2))
    assert_viewless_tensor(out)
    x = sample(2)
    del out
    graph(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_gradients_are_those_of_a_plain_module():
    torch.manual_seed(0)
    layer, plain = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    graph_inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    specs = [GraphSpec(layer, layer.forward, (sample(2, 4),), {}, slot) for slot in range(2)]
    graphs = EagerGraphRunner().capture(specs)
    outputs = [graph(x) for graph, x in zip(graphs, graph_inputs, strict=True)]
    for out in reversed(outputs):
        out.square().sum().backward()
    plain_inputs = [x.detach().clone().requires_grad_() for x in graph_inputs]
    for x in reversed(plain_inputs):
        plain(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    for x, reference in zip(graph_inputs, plain_inputs, strict=True):
        assert torch.equal(x.grad, reference.grad)


def test_a_graph_that_was_reset_is_gone():
    graph = graph_of(double, sample(2))
    graph.reset()
    graph.reset()
    with pytest.raises(GraphStateError, match="reset"):
        graph(sample(2))


def test_outputs_of_inference_are_spoilt_too():
    graph = graph_of(double, sample(2))
    with torch.inference_mode():
        first = graph(torch.ones(2))
    for _ in range(2):
        graph(sample(2)).sum().backward()
    assert first.isnan().all()


def test_a_graph_runs_under_the_autocast_of_its_capture(checked_runner):
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    spec = GraphSpec(layer, layer.forward, (x.clone(),))
    [plain] = checked_runner.capture([spec])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [cast] = checked_runner.capture([spec])
        assert cast(x).dtype is torch.bfloat16
        with pytest.raises(GraphInputMismatch, match=r"autocast is torch.bfloat16, .* with None"):
            plain(x)
    with pytest.raises(GraphInputMismatch, match=r"autocast is None, .* torch.bfloat16"):
        cast(x)
    assert plain(x).dtype is torch.float32
