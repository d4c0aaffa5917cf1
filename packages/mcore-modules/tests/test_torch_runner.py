import copy

import pytest
import torch
from torch.utils import _pytree as pytree

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

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Emulated:
    """A graph on the CPU with the static memory of a CUDA graph, which each replay writes again."""

    def __init__(self, function, arguments, warmups, allow_unused):
        self.function, self.arguments = function, arguments
        self.allow_unused = allow_unused
        self.inputs = pytree.tree_leaves(arguments)
        for _ in range(warmups + 1):
            self.run()
        self.outputs = [out.detach().clone() for out in self.live]
        self.grads = [torch.zeros_like(x) if x.requires_grad else None for x in self.inputs]
        self.pointer = {id(x): x.data_ptr() for x in self.inputs}
        self.copies = 0

    def run(self):
        with torch.enable_grad():
            self.live, self.spec = pytree.tree_flatten(self.function(*self.arguments))

    def __call__(self, *arguments):
        out = _EmulatedFunction.apply(self, *pytree.tree_leaves(arguments))
        return pytree.tree_unflatten(out, self.spec)


class _EmulatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, *inputs):
        ctx.graph = graph
        with torch.no_grad():
            for static, given in zip(graph.inputs, inputs, strict=True):
                if static.data_ptr() != given.data_ptr():
                    graph.copies += 1
                    static.copy_(given)
        graph.run()
        for static, live in zip(graph.outputs, graph.live, strict=True):
            static.copy_(live.detach())
        return tuple(out.detach() for out in graph.outputs)

    @staticmethod
    def backward(ctx, *grads):
        graph = ctx.graph
        wanted = [x for x in graph.inputs if x.requires_grad]
        computed = iter(
            torch.autograd.grad(graph.live, wanted, grads, allow_unused=graph.allow_unused)
        )
        returned = []
        for static in graph.grads:
            grad = None if static is None else next(computed)
            returned.append(None if grad is None else static.copy_(grad).detach())
        return (None, *returned)


class Maker:
    """Stands in for make_graphed_callables; keeps its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, functions, samples, *, num_warmup_iters, allow_unused_input):
        graphs = tuple(
            Emulated(function, sample, num_warmup_iters, allow_unused_input)
            for function, sample in zip(functions, samples, strict=True)
        )
        self.calls.append(graphs)
        return graphs


def sample(*shape):
    return torch.ones(shape, requires_grad=True)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.factor


def accumulated(clone):
    """Two microbatches whose gradients for the factor are 1 and 10."""
    layer = Scale()
    runner = TorchGraphRunner(clone_param_grads=clone, make_graphed_callables=Maker())
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (torch.ones(1),))])
    for value in (1.0, 10.0):
        graph(torch.full((1,), value)).sum().backward()
    return layer.factor.grad.item()


def test_gradients_of_microbatches_add_up():
    assert accumulated(clone=True) == 11.0
    # What happens without the copies, which shows that the emulation has the same memory.
    assert accumulated(clone=False) == 20.0


def test_gradients_of_an_input_that_is_a_leaf_add_up():
    layer = Scale()
    runner = TorchGraphRunner(make_graphed_callables=Maker())
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


def test_results_are_those_of_the_plain_module():
    torch.manual_seed(0)
    layer = Rich()
    plain = copy.deepcopy(layer)
    maker = Maker()
    kwargs = {"mask": torch.ones(4), "bias": sample(2, 4)}
    spec = GraphSpec(layer, layer.forward, (sample(2, 4),), kwargs)
    [graph] = TorchGraphRunner(make_graphed_callables=maker).capture([spec])
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
    # Three inputs at three replays; parameters are read where they lie.
    assert maker.calls[0][0].copies == 9


def test_outputs_that_are_no_tensors_are_kept():
    layer = torch.nn.Linear(2, 2)

    def forward(x):
        y = layer.forward(x)
        return y, None, {"again": y, "name": "layer"}

    runner = TorchGraphRunner(make_graphed_callables=Maker())
    [graph] = runner.capture([GraphSpec(layer, forward, (sample(1, 2),))])
    x = torch.randn(1, 2, requires_grad=True)
    y, nothing, rest = graph(x)
    assert torch.equal(y, layer(x))
    assert nothing is None
    assert rest["again"] is y
    assert rest["name"] == "layer"


def test_a_parameter_that_was_removed_is_an_error():
    layer = Scale()
    runner = TorchGraphRunner(make_graphed_callables=Maker())
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (torch.ones(1),))])
    layer.factor = None
    with pytest.raises(RuntimeError, match="'factor' was removed"):
        graph(torch.ones(1))


def test_slots_are_captured_apart_and_layers_in_order():
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    specs = [
        GraphSpec(layer, layer.forward, (sample(1, 2),), {}, slot, order)
        for slot in range(3)
        for order, layer in enumerate(layers)
    ]
    maker = Maker()
    graphs = TorchGraphRunner(make_graphed_callables=maker).capture(specs)
    assert [len(call) for call in maker.calls] == [2, 2, 2]
    x = torch.randn(1, 2, requires_grad=True)
    for spec, graph in zip(specs, graphs, strict=True):
        assert torch.equal(graph(x), spec.module(x))


def test_one_forward_one_backward_over_two_slots():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    plain = copy.deepcopy(layer)
    specs = [GraphSpec(layer, layer.forward, (sample(2, 4),), {}, slot) for slot in range(2)]
    graphs = TorchGraphRunner(make_graphed_callables=Maker()).capture(specs)
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


def test_parameters_put_in_place_after_the_capture_are_used():
    layer = Scale()
    runner = TorchGraphRunner(make_graphed_callables=Maker())
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (torch.ones(1),))])
    layer.load_state_dict({"factor": torch.full((1,), 7.0)}, assign=True)
    graph(torch.ones(1)).sum().backward()
    assert graph(torch.ones(1)).item() == 7.0
    assert layer.factor.grad.item() == 1.0


def test_the_module_and_its_gradients_are_left_as_they_are():
    layer = torch.nn.Linear(2, 2)
    layer.weight.main_grad = torch.zeros(2, 2)
    names = set(vars(layer))
    seen = []

    def forward(x):
        seen.append(layer.weight.main_grad)
        return layer.forward(x)

    spec = GraphSpec(layer, forward, (sample(1, 2),))
    TorchGraphRunner(make_graphed_callables=Maker()).capture([spec])
    assert set(vars(layer)) == names
    assert layer.weight.grad is None
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert all(grad is layer.weight.main_grad for grad in seen)


def test_unused_parameters_are_refused_or_get_no_gradient():
    class Unused(Scale):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Parameter(torch.ones(1))

    layer = Unused()
    runner = TorchGraphRunner(make_graphed_callables=Maker())
    spec = GraphSpec(layer, layer.forward, (torch.ones(1),))
    [graph] = runner.capture([spec], allow_unused_input=True)
    graph(torch.ones(1)).sum().backward()
    assert layer.spare.grad is None
    assert layer.factor.grad.item() == 1.0


def test_autocast_cache_is_off_during_capture_only():
    seen = []

    def make(functions, samples, **options):
        seen.append((torch.is_autocast_cache_enabled(), torch.is_autocast_enabled("cpu")))
        return Maker()(functions, samples, **options)

    layer = torch.nn.Linear(2, 2)
    spec = GraphSpec(layer, layer.forward, (sample(1, 2),))
    runner = TorchGraphRunner(make_graphed_callables=make)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [graph] = runner.capture([spec])
        assert torch.is_autocast_cache_enabled()
        assert graph(torch.ones(1, 2, requires_grad=True)).dtype is torch.bfloat16
    assert seen == [(False, True)]


def test_the_contract_of_graphs_holds():
    layer = torch.nn.Linear(2, 2)
    runner = TorchGraphRunner(make_graphed_callables=Maker())
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
