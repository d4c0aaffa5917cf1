import copy
from typing import ClassVar

import pytest
import torch

from mcore.modules import (
    GraphableMegatronModule,
    GraphInputMismatch,
    GraphStateError,
    TransformerConfig,
)
from mcore.modules.graphs import (
    EagerGraphRunner,
    GraphSpec,
    TorchGraphRunner,
    capture_graphs,
    resolve_graph_runner,
    set_current_microbatch,
)
from mcore.modules.graphs.runner import MemoryPool, preserved_state
from mcore.parallel.rng import get_cuda_rng_tracker

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def sample(*shape):
    return torch.ones(shape, requires_grad=True)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.factor


def accumulated(cpu_graphs, clone):
    """Two microbatches whose gradients for the factor are 1 and 10."""
    layer = Scale()
    runner = TorchGraphRunner(clone_param_grads=clone, device=cpu_graphs)
    spec = GraphSpec(layer, layer.forward, (torch.ones(1),))
    assert (spec.microbatch, spec.order, spec.pool) == (0, 0, None)
    [graph] = runner.capture([spec])
    for value in (1.0, 10.0):
        graph(torch.full((1,), value)).sum().backward()
    return layer.factor.grad.item()


def test_gradients_of_microbatches_add_up(cpu_graphs):
    assert accumulated(cpu_graphs, clone=True) == 11.0
    # What happens without the copies, which shows that the emulation has the same memory.
    assert accumulated(cpu_graphs, clone=False) == 20.0


def test_gradients_of_an_input_that_is_a_leaf_add_up(cpu_graphs):
    layer = Scale()
    runner = TorchGraphRunner(device=cpu_graphs)
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (sample(1),))])
    x = sample(1)
    graph(x).sum().backward()
    (graph(x) * 10).sum().backward()
    assert x.grad.item() == 11.0


class Rich(torch.nn.Module):
    """Positional and keyword inputs, a frozen and a tied parameter, nested outputs."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, x, *, mask, bias):
        y = self.second(self.first(x).tanh()) * mask + bias
        return {"y": y, "rest": (y * self.frozen,)}


def test_results_are_those_of_the_plain_module(cpu_graphs):
    torch.manual_seed(0)
    layer = Rich()
    plain = copy.deepcopy(layer)
    kwargs = {"mask": torch.ones(4), "bias": sample(2, 4)}
    spec = GraphSpec(layer, layer.forward, (sample(2, 4),), kwargs)
    [graph] = TorchGraphRunner(device=cpu_graphs).capture([spec])
    for seed in range(3):
        torch.manual_seed(seed)
        x, bias, mask = torch.randn(2, 4), torch.randn(2, 4), torch.rand(4)
        results = []
        for run in (graph, plain):
            inputs = [t.clone().requires_grad_() for t in (x, bias)]
            out = run(inputs[0], bias=inputs[1], mask=mask)
            (out["y"].square().sum() + out["rest"][0].sum()).backward()
            results.append([out["y"], out["rest"][0], inputs[0].grad, inputs[1].grad])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None if theirs.grad is None else torch.equal(ours.grad, theirs.grad)


def test_outputs_that_are_no_tensors_are_kept(cpu_graphs):
    layer = torch.nn.Linear(2, 2)

    def forward(x):
        y = layer.forward(x)
        return y, None, {"again": y, "name": "layer"}

    runner = TorchGraphRunner(device=cpu_graphs)
    [graph] = runner.capture([GraphSpec(layer, forward, (sample(1, 2),))])
    x = torch.randn(1, 2, requires_grad=True)
    y, nothing, rest = graph(x)
    assert torch.equal(y, layer(x))
    assert nothing is None
    assert rest["again"] is y
    assert rest["name"] == "layer"


def test_a_parameter_that_was_removed_is_an_error(cpu_graphs):
    layer = Scale()
    runner = TorchGraphRunner(device=cpu_graphs)
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (torch.ones(1),))])
    layer.factor = None
    with pytest.raises(GraphInputMismatch, match="'factor' of the layer was removed"):
        graph(torch.ones(1))


class Square(torch.autograd.Function):
    contexts: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        Square.contexts.append(ctx)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("pool", [None, MemoryPool()])
def test_a_shared_pool_keeps_the_tensors_that_a_backward_reads(cpu_graphs, pool):
    layer = torch.nn.Identity()
    spec = GraphSpec(layer, Square.apply, (sample(2),), pool=pool)
    graphs = TorchGraphRunner(device=cpu_graphs).capture([spec])
    recorded = Square.contexts[-1]
    if pool is None:
        with pytest.raises(RuntimeError, match="second time"):
            recorded.saved_tensors  # noqa: B018
    else:
        assert recorded.saved_tensors[0].tolist() == [2.0, 2.0]
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    graphs[0](x).sum().backward()
    assert x.grad.tolist() == [6.0, 8.0]


def test_slots_are_captured_apart_and_layers_in_order(cpu_graphs):
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    specs = [
        GraphSpec(layer, layer.forward, (sample(1, 2),), {}, slot, order)
        for slot in range(3)
        for order, layer in enumerate(layers)
    ]
    graphs = TorchGraphRunner(device=cpu_graphs).capture(specs)
    assert cpu_graphs.warm_ups == 3
    for slot, recorded in cpu_graphs.pools.items():
        forward, backward, next_forward, next_backward = cpu_graphs.graphs[4 * slot : 4 * slot + 4]
        assert recorded == [forward, next_forward, next_backward, backward]
    x = torch.randn(1, 2, requires_grad=True)
    for spec, graph in zip(specs, graphs, strict=True):
        assert torch.equal(graph(x), spec.module(x))


def test_one_forward_one_backward_over_two_slots(cpu_graphs):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    plain = copy.deepcopy(layer)
    specs = [GraphSpec(layer, layer.forward, (sample(2, 4),), {}, slot) for slot in range(2)]
    graphs = TorchGraphRunner(device=cpu_graphs).capture(specs)
    inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(4)]
    in_flight = []
    for number, x in enumerate(inputs):
        if len(in_flight) == 2:
            in_flight.pop(0).square().sum().backward()
        in_flight.append(graphs[number % 2](x))
    for out in in_flight:
        out.square().sum().backward()
    for x in inputs:
        plain(x.detach()).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_tensors_that_are_no_longer_those_of_the_capture_are_refused(checked_runner):
    layer = torch.nn.BatchNorm1d(2)
    layer.bias.requires_grad_(False)
    spec = GraphSpec(layer, layer.forward, (torch.ones(3, 2),))
    changes = {
        "'weight' of the layer was replaced": lambda: layer.load_state_dict(
            {name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True
        ),
        "'weight' of the layer was replaced or moved": lambda: setattr(
            layer.weight, "data", layer.weight.data.clone()
        ),
        "'bias' of the layer requires grad, but did not": lambda: layer.bias.requires_grad_(),
        "'running_mean' of the layer was replaced": lambda: setattr(
            layer, "running_mean", torch.zeros(2)
        ),
        "'bias' of the layer was removed": lambda: setattr(layer, "bias", None),
    }
    for text, change in changes.items():
        [graph] = checked_runner.capture([spec])
        graph(torch.ones(3, 2)).sum().backward()
        change()
        with pytest.raises(GraphInputMismatch, match=text):
            graph(torch.ones(3, 2))


def test_a_frozen_parameter_may_be_frozen_later_and_needs_no_gradient(cpu_graphs):
    layer = torch.nn.Linear(2, 2)
    [graph] = TorchGraphRunner(device=cpu_graphs).capture(
        [GraphSpec(layer, layer.forward, (sample(1, 2),))]
    )
    layer.bias.requires_grad_(False)
    graph(torch.ones(1, 2)).sum().backward()
    assert layer.bias.grad is None
    assert layer.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_the_module_and_its_gradients_are_left_as_they_are(cpu_graphs):
    layer = torch.nn.Linear(2, 2)
    layer.weight.main_grad = torch.zeros(2, 2)
    names = set(vars(layer))
    seen = []

    def forward(x):
        seen.append(layer.weight.main_grad)
        return layer.forward(x)

    spec = GraphSpec(layer, forward, (sample(1, 2),))
    TorchGraphRunner(device=cpu_graphs).capture([spec])
    assert set(vars(layer)) == names
    assert layer.weight.grad is None
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert all(grad is layer.weight.main_grad for grad in seen)


def test_unused_parameters_are_refused_or_get_no_gradient(cpu_graphs):
    class Unused(Scale):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Parameter(torch.ones(1))

    layer = Unused()
    runner = TorchGraphRunner(device=cpu_graphs)
    spec = GraphSpec(layer, layer.forward, (torch.ones(1),))
    [graph] = runner.capture([spec], allow_unused_input=True)
    graph(torch.ones(1)).sum().backward()
    assert layer.spare.grad is None
    assert layer.factor.grad.item() == 1.0


def test_autocast_cache_is_off_during_capture_only(cpu_graphs):
    seen = []
    layer = torch.nn.Linear(2, 2)

    def forward(x):
        seen.append((torch.is_autocast_cache_enabled(), torch.is_autocast_enabled("cpu")))
        return layer(x)

    spec = GraphSpec(layer, forward, (sample(1, 2),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [graph] = TorchGraphRunner(device=cpu_graphs).capture([spec])
        assert torch.is_autocast_cache_enabled()
        assert graph(torch.ones(1, 2, requires_grad=True)).dtype is torch.bfloat16
    assert set(seen) == {(False, True)}


class Auxiliary(torch.nn.Module):
    """Two outputs; the second alone may be used."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = x * self.weight
        return h, (h * h).sum(), h.detach(), x.argmax()


def test_a_call_of_which_another_output_is_used_is_in_flight_too(checked_runner):
    layer, plain = Auxiliary(), Auxiliary()
    specs = [GraphSpec(layer, layer.forward, (sample(1),), {}, slot) for slot in range(2)]
    graphs = checked_runner.capture(specs)
    inputs = [torch.tensor([value], requires_grad=True) for value in (1.0, 10.0)]
    losses = [graph(x)[1] for graph, x in zip(graphs, inputs, strict=True)]
    with pytest.raises(GraphStateError, match="before the backward"):
        graphs[0](inputs[1])
    for loss in losses:
        loss.backward()
    for x in inputs:
        plain(x.detach())[1].backward()
    assert layer.weight.grad.item() == plain.weight.grad.item() == 202.0
    h, auxiliary, *_ = graphs[0](inputs[0])
    (h.sum() + auxiliary).backward()
    graphs[0](inputs[1])[1].backward()
    plain(inputs[0].detach())[0].backward()
    for x in inputs:
        plain(x.detach())[1].backward()
    assert layer.weight.grad.item() == plain.weight.grad.item()
    outputs = graphs[0](inputs[0])
    assert [out.requires_grad for out in outputs] == [True, True, False, False]


def test_a_second_or_late_backward_is_refused(checked_runner):
    layer = Scale()
    [graph] = checked_runner.capture([GraphSpec(layer, layer.forward, (torch.ones(1),))])
    loss = graph(torch.ones(1)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GraphStateError, match="second backward"):
        loss.backward()
    loss = graph(torch.ones(1)).sum()
    graph._strict = False
    graph(torch.ones(1))
    graph._strict = True
    with pytest.raises(GraphStateError, match="overwritten"):
        loss.backward()


def test_inputs_without_a_gradient_are_no_mismatch(checked_runner):
    """A frozen embedding before the layer, no_grad in training, reentrant recomputation."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    plain = copy.deepcopy(layer)
    [graph] = checked_runner.capture([GraphSpec(layer, layer.forward, (sample(2, 4),))])
    x = torch.randn(2, 4)
    graph(x).square().sum().backward()
    with torch.no_grad():
        assert torch.equal(graph(x), plain(x))
    given = x.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(graph, given, use_reentrant=True)
    out.square().sum().backward()
    for expected in (x, reference := x.clone().requires_grad_()):
        plain(expected).square().sum().backward()
    assert torch.equal(given.grad, reference.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    [without] = checked_runner.capture([GraphSpec(layer, layer.forward, (torch.ones(2, 4),))])
    with pytest.raises(GraphInputMismatch, match="requires_grad is True, captured with False"):
        without(sample(2, 4))
    with torch.no_grad():
        without(sample(2, 4))


class Drops(torch.nn.Module):
    """Draws from the tracker's stream in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(self.linear(x))


def drawn(call, x):
    """Three calls, two of which are microbatches; what they return and the next number."""
    outputs = []
    for _ in range(3):
        out = call(x)
        out.sum().backward()
        outputs.append(out.detach().clone())
    with get_cuda_rng_tracker().fork():
        return [*outputs, torch.rand(3)]


def test_dropout_in_a_fork_of_the_tracker_draws_what_eager_layers_draw(cpu_graphs, seeded):
    torch.manual_seed(0)
    layer = Drops()
    x = torch.ones(2, 64)
    seeded(use_cudagraphable_rng=True)
    expected = drawn(layer, x)
    seeded(use_cudagraphable_rng=True)
    with preserved_state([layer], CPU):
        [graph] = TorchGraphRunner(device=cpu_graphs).capture(
            [GraphSpec(layer, layer.forward, (x.clone(),))]
        )
    for ours, theirs in zip(drawn(graph, x), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_fork_of_a_tracker_with_plain_states_is_refused(checked_runner, seeded):
    seeded()
    layer = Drops()
    spec = GraphSpec(layer, layer.forward, (torch.ones(2, 64),))
    with pytest.raises(GraphStateError, match="use_cudagraphable_rng=True"):
        # The eager runner runs layers only when they are called.
        checked_runner.capture([spec])[0](torch.ones(2, 64))
    layer(torch.ones(2, 64))


def test_the_contract_of_graphs_holds(cpu_graphs):
    layer = torch.nn.Linear(2, 2)
    runner = TorchGraphRunner(device=cpu_graphs)
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (sample(1, 2),))])
    with pytest.raises(GraphInputMismatch, match=r"shape is \(3, 2\)"):
        graph(sample(3, 2))
    out = graph(sample(1, 2))
    with pytest.raises(GraphStateError, match="before the backward"):
        graph(sample(1, 2))
    del out
    graph.reset()
    with pytest.raises(GraphStateError, match="reset"):
        graph(sample(1, 2))


def test_a_device_without_graphs_is_refused():
    layer = torch.nn.Linear(2, 2)
    assert TorchGraphRunner().is_available(CPU) is False
    with pytest.raises(RuntimeError, match="no graphs on cpu"):
        TorchGraphRunner().capture([GraphSpec(layer, layer.forward, (sample(1, 2),))])


class Layer(GraphableMegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = torch.nn.BatchNorm1d(config.hidden_size)

    def forward(self, hidden_states):
        length, batch, hidden = hidden_states.shape
        flat = self.norm(self.linear(hidden_states).view(-1, hidden))
        return torch.nn.functional.dropout(flat, 0.5).view(length, batch, hidden)


def graphable_model():
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=2, cuda_graph_impl="transformer_engine"
    )
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(config), Layer(config)).to("cuda")


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_capture_leaves_buffers_and_random_states_alone():
    """BatchNorm's buffers and the generators of CPU and GPU, before and after a real capture."""
    model = graphable_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    capture_graphs(model, 16, 2, num_graphs=2, runner=TorchGraphRunner())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


class Deterministic(GraphableMegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(hidden_states))


def deterministic_model(runner):
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=2, cuda_graph_impl="transformer_engine"
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Deterministic(config) for _ in range(2)]).to("cuda")
    if runner is not None:
        capture_graphs(model, 16, 2, num_graphs=2, runner=runner)
    return model


def one_step(model):
    """Two microbatches in flight at the same time; returns outputs and gradients."""
    torch.manual_seed(1)
    inputs = [torch.randn(16, 2, 64, device="cuda", requires_grad=True) for _ in range(2)]
    outputs = []
    for microbatch, x in enumerate(inputs):
        set_current_microbatch(model, microbatch)
        outputs.append(model(x))
    for out in outputs:
        out.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    return [*(out.detach().clone() for out in outputs), *grads, *(x.grad for x in inputs)]


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_outputs_and_accumulated_gradients_are_those_of_eager_layers():
    """Real CUDA graphs, two microbatches in flight, bit for bit as the same layers run eagerly."""
    eager = one_step(deterministic_model(None))
    graphed = deterministic_model(TorchGraphRunner())
    for _ in range(2):
        graphed.zero_grad()
        for ours, theirs in zip(one_step(graphed), eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_gradients_of_microbatches_add_up():
    """Two microbatches through one real graph, whose gradients for a parameter are 1 and 10."""
    layer = Scale().to("cuda")
    [graph] = TorchGraphRunner().capture(
        [GraphSpec(layer, layer.forward, (torch.ones(1, device="cuda"),))]
    )
    for value in (1.0, 10.0):
        graph(torch.full((1,), value, device="cuda")).sum().backward()
    assert layer.factor.grad.item() == 11.0


def launches(model):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    x = torch.ones(16, 2, 64, device="cuda", requires_grad=True)
    set_current_microbatch(model, 0)
    model(x).sum().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        model(x)
        torch.cuda.synchronize()
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch")
    return sum(event.count for event in profile.key_averages() if event.key in names)


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_a_replay_launches_less_than_an_eager_run():
    """Launch calls that the profiler sees in one forward."""
    assert launches(deterministic_model(TorchGraphRunner())) < launches(deterministic_model(None))


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_torch_graphs_are_the_choice():
    """The choice of runners on a CUDA device without TransformerEngine's."""
    device = torch.device("cuda", 0)
    assert TorchGraphRunner().is_available(device)
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, cuda_graph_impl="local"
    )
    assert resolve_graph_runner(config, device).name == "torch"
    assert not isinstance(resolve_graph_runner(config, device), EagerGraphRunner)


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_a_call_of_which_another_output_is_used_is_in_flight_too():
    """The gradient 202 of two microbatches in flight of which only the second output is used."""
    layer = Auxiliary().to("cuda")
    x = [torch.tensor([value], device="cuda", requires_grad=True) for value in (1.0, 10.0)]
    specs = [GraphSpec(layer, layer.forward, (x[0].detach(),), {}, slot) for slot in range(2)]
    graphs = TorchGraphRunner().capture(specs)
    losses = [graph(data.detach())[1] for graph, data in zip(graphs, x, strict=True)]
    with pytest.raises(GraphStateError, match="before the backward"):
        graphs[0](x[1].detach())
    for loss in losses:
        loss.backward()
    assert layer.weight.grad.item() == 202.0


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_forks_of_the_tracker_draw_what_eager_layers_draw(seeded):
    """Dropout in the tracker's stream: three replays against three eager runs, bit for bit."""
    layer = Drops().to("cuda")
    x = torch.ones(2, 64, device="cuda")
    seeded(use_cudagraphable_rng=True, device="cuda")
    expected = drawn(layer, x)
    seeded(use_cudagraphable_rng=True, device="cuda")
    with preserved_state([layer], x.device):
        [graph] = TorchGraphRunner().capture([GraphSpec(layer, layer.forward, (x.clone(),))])
    for ours, theirs in zip(drawn(graph, x), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(expected[0], expected[1])
    seeded(device="cuda")
    with pytest.raises(GraphStateError, match="use_cudagraphable_rng=True"):
        TorchGraphRunner().capture([GraphSpec(layer, layer.forward, (x.clone(),))])


def pools_of(layer):
    records = layer.cudagraph_manager._records[layer].values()
    return {graph.pool for record in records for graph in record.graphs}


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_layers_captured_alone_share_memory_and_free_it():
    """Managers of four layers: gradients of eager layers, one pool, memory freed with the model."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=1024,
        num_attention_heads=2,
        cuda_graph_impl="local",
        cuda_graph_warmup_steps=1,
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Deterministic(config) for _ in range(4)]).to("cuda")
    plain = copy.deepcopy(model)
    for layer in plain:
        object.__setattr__(layer, "cudagraph_manager", lambda m, a, k: m.forward(*a, **k))
    x = torch.randn(64, 2, 1024, device="cuda")
    for _ in range(3):
        for run in (model, plain):
            outputs = [run(x), run(x * 2)]
            for out in reversed(outputs):
                out.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    pools = [pools_of(layer) for layer in model]
    assert all(found == pools[0] and len(found) == 2 for found in pools)
    del outputs
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    del model, run
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


class Noise(torch.autograd.Function):
    """The identity, whose gradient is drawn from the tracker."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with get_cuda_rng_tracker().fork():
            return grad * torch.rand_like(grad)


class Noisy(torch.nn.Module):
    def forward(self, x):
        return Noise.apply(x)


def test_a_backward_that_draws_gets_new_numbers_in_each_replay(cpu_graphs, seeded):
    def gradients(run):
        inputs = [torch.ones(2, 64, requires_grad=True) for _ in range(2)]
        for x in inputs:
            run(x).sum().backward()
        return [x.grad for x in inputs]

    layer, x = Noisy(), torch.ones(2, 64, requires_grad=True)
    seeded(use_cudagraphable_rng=True)
    expected = gradients(layer)
    assert not torch.equal(*expected)
    seeded(use_cudagraphable_rng=True)
    with preserved_state([layer], CPU):
        [graph] = TorchGraphRunner(device=cpu_graphs).capture(
            [GraphSpec(layer, layer.forward, (x.detach().clone().requires_grad_(),))]
        )
    for ours, theirs in zip(gradients(graph), expected, strict=True):
        assert torch.equal(ours, theirs)
