import copy
import enum
import gc
import logging
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mcore.modules import GraphableMegatronModule, GraphStateError
from mcore.modules.graphs import (
    EagerGraphRunner,
    GraphSpec,
    LocalGraphManager,
    TorchGraphRunner,
    graph_capturing,
    local,
)
from mcore.parallel.rng import get_cuda_rng_tracker


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.eager_calls = 0
        self.bodies = 0

    def __call__(self, *args, **kwargs):
        raise AssertionError("the manager does not use it")

    def forward(self, x, scale=1.0, *, mask=None, mode=Mode.FAST):
        self.bodies += 1
        y = self.linear(x) * scale
        return y if mask is None else y * mask


@pytest.fixture
def fresh_log(caplog):
    local._log_eager.cache_clear()
    caplog.set_level(logging.WARNING, logger="mcore.modules")
    return caplog


def manager_of(runner=None, warmups=2, **options):
    return LocalGraphManager(SimpleNamespace(cuda_graph_warmup_steps=warmups), runner, **options)


def x(*shape):
    return torch.ones(shape or (2, 4))


def test_warm_ups_run_eagerly_then_one_graph_serves_all_calls(runner):
    layer = Layer()
    manager = manager_of(runner)
    expected = layer.linear(x())
    for call in range(5):
        assert torch.equal(manager(layer, (x(),), {}), expected)
        assert manager.num_graphs == (0 if call < 2 else 1)
    assert runner.events == [("capture", 0, 0)] + 3 * [("replay", 0, 0, None, ((2, 4),))]


def test_default_number_of_warm_ups_is_three():
    manager, layer = LocalGraphManager(SimpleNamespace(), EagerGraphRunner()), Layer()
    for _ in range(3):
        manager(layer, (x(),), {}).sum().backward()
    assert manager.num_graphs == 0
    manager(layer, (x(),), {})
    assert manager.num_graphs == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((x(3, 4),), {}),
        ((x().double(),), {}),
        ((x().requires_grad_(),), {}),
        ((x(), 2.0), {}),
        ((x(),), {"scale": 1.0}),
        ((x(),), {"mask": torch.ones(4)}),
        ((x(),), {"mask": None}),
        ((x(),), {"mode": Mode.SLOW}),
        ((x(), True), {}),
    ],
)
def test_calls_that_differ_have_graphs_of_their_own(args, kwargs, runner):
    layer = Layer()
    if args[0].dtype is torch.float64:
        layer = layer.double()
        first = (x().double()[:1],)
    else:
        first = (x(),)
    manager = manager_of(runner, warmups=0)
    manager(layer, first, {})
    expected = layer.forward(*args, **kwargs)
    assert torch.equal(manager(layer, args, kwargs), expected)
    assert manager.num_graphs == 2
    manager(layer, args, kwargs)
    manager(layer, first, {})
    assert manager.num_graphs == 2


def test_equal_constants_of_different_types_differ(runner):
    manager, layer = manager_of(runner, warmups=0), Layer()
    for scale in (1, 1.0, True):
        manager(layer, (x(), scale), {})
    assert manager.num_graphs == 3


@pytest.mark.parametrize(
    ("scales", "graphs"),
    [((0.0, -0.0), 2), ((float("nan"), float("nan")), 1), ((1j, 1j), 1)],
)
def test_floats_are_compared_by_their_bits(scales, graphs, runner):
    manager, layer = manager_of(runner, warmups=0), Layer()
    for scale in scales:
        manager(layer, (x(), scale), {})
    assert manager.num_graphs == graphs


def test_tuples_are_compared_by_their_items(runner):
    class Padding(Layer):
        def forward(self, x, sizes):
            return torch.nn.functional.pad(x, sizes)

    manager, layer = manager_of(runner, warmups=0), Padding()
    widths = [manager(layer, (x(), (0, size)), {}).shape[1] for size in (1, 3, 1)]
    assert widths == [5, 7, 5]
    assert manager.num_graphs == 2


def test_autocast_has_a_graph_of_its_own(runner):
    manager, layer = manager_of(runner, warmups=0), Layer()
    manager(layer, (x(),), {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert manager(layer, (x(),), {}).dtype is torch.bfloat16
    assert manager.num_graphs == 2


def test_modules_have_graphs_of_their_own(runner):
    manager = manager_of(runner, warmups=0)
    layers = [Layer(), Layer()]
    for layer in layers:
        assert torch.equal(manager(layer, (x(),), {}), layer.linear(x()))
    assert manager.num_graphs == 2


def test_calls_in_flight_get_further_graphs_up_to_the_limit():
    manager, layer = manager_of(EagerGraphRunner(), warmups=0, max_graphs_per_key=3), Layer()
    outputs = [manager(layer, (x(),), {}) for _ in range(3)]
    assert manager.num_graphs == 3
    with pytest.raises(GraphStateError, match="all 3 graphs of Layer"):
        manager(layer, (x(),), {})
    outputs.pop().sum().backward()
    outputs.append(manager(layer, (x(),), {}))
    assert manager.num_graphs == 3
    with pytest.raises(ValueError, match="max_graphs_per_key is 0"):
        manager_of(max_graphs_per_key=0)


def test_gradients_are_those_of_the_plain_layer():
    torch.manual_seed(0)
    layer = Layer()
    plain = copy.deepcopy(layer)
    manager = manager_of(EagerGraphRunner(), warmups=1)
    for seed in range(4):
        torch.manual_seed(seed)
        data = torch.randn(2, 4)
        manager(layer, (data,), {"mask": torch.ones(4)}).square().sum().backward()
        plain.forward(data, mask=torch.ones(4)).square().sum().backward()
    assert torch.equal(layer.linear.weight.grad, plain.linear.weight.grad)


@pytest.mark.parametrize("how", ["no_grad", "eval", "capturing"])
def test_calls_outside_of_training_run_eagerly(how, runner):
    layer = Layer()
    manager = manager_of(runner, warmups=0)
    if how == "eval":
        layer.eval()
        manager(layer, (x(),), {})
    else:
        with torch.no_grad() if how == "no_grad" else graph_capturing():
            manager(layer, (x(),), {})
    assert runner.events == []
    assert layer.bodies == 1


@pytest.mark.parametrize(
    "argument", [[1], object(), (x(),), {"a": 1}], ids=lambda a: type(a).__name__
)
def test_other_arguments_run_eagerly_with_one_warning(fresh_log, argument, runner):
    class Takes(Layer):
        def forward(self, data, other):
            return super().forward(data)

    layer = Takes()
    manager = manager_of(runner, warmups=0)
    for _ in range(2):
        assert torch.equal(manager(layer, (x(), argument), {}), layer.linear(x()))
    assert runner.events == []
    [record] = fresh_log.records
    assert "Takes runs without a graph: argument 1 is a" in record.getMessage()


@pytest.mark.parametrize("register", ["full_backward_hook", "full_backward_pre_hook"])
def test_layers_with_backward_hooks_run_eagerly_with_one_warning(fresh_log, register, runner):
    layer, calls = Layer(), []
    manager = manager_of(runner, warmups=0)
    getattr(layer, f"register_{register}")(lambda *_: calls.append(1))
    for _ in range(2):
        manager(layer, (x().requires_grad_(),), {}).sum().backward()
    assert len(calls) == 2
    assert runner.events == []
    assert "backward hooks" in fresh_log.records[0].getMessage()
    assert len(fresh_log.records) == 1


def test_layers_with_forward_hooks_run_eagerly_with_one_warning(fresh_log, runner):
    layer = Layer()
    manager = manager_of(runner, warmups=0)
    layer.register_forward_hook(lambda module, args, out: out + 1)
    for _ in range(2):
        assert torch.equal(manager(layer, (x(),), {}), layer.linear(x()) + 1)
    assert runner.events == []
    assert "forward hooks" in fresh_log.records[0].getMessage()


def test_capture_leaves_buffers_and_random_states_alone():
    class Norm(torch.nn.BatchNorm1d):
        pass

    class Running(EagerGraphRunner):
        """Runs each layer four times during the capture, as a device's runner does."""

        def capture(self, specs, **options):
            for spec in specs:
                for _ in range(4):
                    torch.nn.functional.dropout(spec.fn(*spec.args))
            return super().capture(specs, **options)

    layer = Norm(4)
    manager = manager_of(Running(), warmups=0)
    before = torch.get_rng_state()
    manager(layer, (x(),), {})
    assert layer.num_batches_tracked.item() == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_without_gradient_survive_the_next_call():
    memory = torch.zeros(2, 4)

    class OneMemory(EagerGraphRunner):
        """Its graphs write their outputs to one place, as those of a device do."""

        def capture(self, specs, **options):
            return super().capture([replace(spec, fn=memory.copy_) for spec in specs])

    layer = Layer().requires_grad_(False)
    manager = manager_of(OneMemory(), warmups=0)
    first, second = (manager(layer, (x() * value,), {}) for value in (1.0, 2.0))
    assert manager.num_graphs == 1
    assert (first == 1).all()
    assert (second == 2).all()


def test_outputs_of_graphs_that_cannot_be_watched_survive_the_next_call():
    memory = torch.zeros(2, 4)

    class Plain:
        def __call__(self, value, **_):
            return memory.copy_(value)

        def reset(self):
            pass

    class Foreign(EagerGraphRunner):
        def capture(self, specs, **options):
            return [Plain() for _ in specs]

    manager, layer = manager_of(Foreign(), warmups=0), Layer()
    first, second = (manager(layer, (x() * value,), {}) for value in (1.0, 2.0))
    assert (first == 1).all()
    assert (second == 2).all()


def test_reset_starts_again_with_warm_ups(runner):
    layer = Layer()
    manager = manager_of(runner, warmups=1)
    for _ in range(2):
        manager(layer, (x(),), {})
    [record] = manager._records[layer].values()
    [graph] = record.graphs
    manager.reset()
    manager.reset()
    with pytest.raises(GraphStateError, match="reset"):
        graph(x())
    assert manager.num_graphs == 0
    manager(layer, (x(),), {})
    assert manager.num_graphs == 0
    assert len(runner.events) == 2


def test_the_runner_is_chosen_at_the_first_capture():
    manager, layer = manager_of(warmups=1), Layer()
    manager(layer, (x(),), {})
    assert manager.runner is None
    manager(layer, (x(),), {})
    assert manager.runner.name == "eager"


def test_a_graph_does_not_keep_the_first_inputs_alive(runner):
    manager, layer = manager_of(runner, warmups=0), Layer()
    first = x()
    reference = weakref.ref(first)
    manager(layer, (first,), {"mode": Mode.FAST})
    del first
    gc.collect()
    assert reference() is None


class Residual(GraphableMegatronModule):
    def __init__(self, runner):
        super().__init__(
            SimpleNamespace(cuda_graph_impl="local", cuda_graph_warmup_steps=1),
            graph_runner=runner,
        )
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(hidden_states))


def graphs_of(layer):
    records = layer.cudagraph_manager._records[layer].values()
    return [graph for record in records for graph in record.graphs]


def train(model, schedule, seed=0):
    """Forwards ("F") and backwards ("B", of the call that is in flight longest)."""
    torch.manual_seed(seed)
    in_flight, inputs = [], []
    for step in schedule:
        if step == "B":
            in_flight.pop(0).square().sum().backward()
            continue
        inputs.append(torch.randn(2, 4, requires_grad=True))
        in_flight.append(model(inputs[-1]))
    return [x.grad for x in inputs] + [parameter.grad.clone() for parameter in model.parameters()]


def recomputed(runner, use_reentrant, in_flight, device, after=torch.sin):
    """A layer and a plain one with its weights after steps in which both were recomputed."""
    torch.manual_seed(0)
    layer, plain = Residual(runner).to(device), Residual(None).to(device)
    plain.load_state_dict(layer.state_dict())
    object.__setattr__(plain, "cudagraph_manager", lambda m, args, kwargs: m.forward(*args))
    options = {"use_reentrant": use_reentrant}
    for _ in range(4):
        x = torch.randn(2, 4, requires_grad=True, device=device)
        for model in (layer, plain):
            outputs = [
                checkpoint(lambda x, run=model: after(run(x)), x, **options)
                for _ in range(in_flight)
            ]
            for out in outputs:
                out.square().sum().backward()
    return layer, plain


def test_an_eager_call_whose_backward_has_ended_delays_no_capture(runner):
    manager, layer = manager_of(runner, warmups=1), Layer()
    kept = manager(layer, (x(),), {})  # the warm-up
    still_open = manager(layer, (x(),), {})
    assert manager.num_graphs == 0  # the warm-up might be recomputed
    for output in (kept, still_open):
        output.sum().backward(retain_graph=True)
    manager(layer, (x(),), {})
    assert manager.num_graphs == 1
    assert kept.grad_fn is not None  # alive, but over


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("after", [torch.sin, torch.neg])
def test_a_recomputation_runs_as_its_forward_did(checked_runner, use_reentrant, in_flight, after):
    """With neg, which saves no tensor, it is repeated only when the layer's backward has begun."""
    layer, plain = recomputed(checked_runner, use_reentrant, in_flight, "cpu", after)
    torch.testing.assert_close(layer.linear.weight.grad, plain.linear.weight.grad)
    assert graphs_of(layer)


def test_on_an_accelerator_a_recomputation_runs_as_its_forward_did(accelerator):
    """Real captures inside checkpoints of both kinds: gradients of eager layers."""
    for use_reentrant in (False, True):
        layer, plain = recomputed(TorchGraphRunner(), use_reentrant, 3, accelerator)
        torch.testing.assert_close(layer.linear.weight.grad, plain.linear.weight.grad)
        assert graphs_of(layer)


@pytest.mark.parametrize("schedule", ["FBFBFB", "FFBFBB", "FFFBBB"])
def test_layers_captured_alone_share_a_pool_for_each_call_in_flight(cpu_graphs, schedule):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Residual(TorchGraphRunner(device=cpu_graphs)) for _ in range(3)])
    plain = copy.deepcopy(model)
    for layer in plain:
        object.__setattr__(layer, "cudagraph_manager", lambda m, a, k: m.forward(*a, **k))
    for seed in range(3):
        ours, theirs = (train(run, schedule, seed) for run in (model, plain))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    most = max(schedule[:end].count("F") - schedule[:end].count("B") for end in range(7))
    assert len(cpu_graphs.pools) == most
    assert [len(graphs_of(layer)) for layer in model] == [most] * 3


def test_layers_that_are_not_in_a_row_share_no_memory(cpu_graphs):
    runner = TorchGraphRunner(device=cpu_graphs)
    towers = [Residual(runner) for _ in range(3)]
    plain = copy.deepcopy(towers)
    for layer in plain:
        object.__setattr__(layer, "cudagraph_manager", lambda m, a, k: m.forward(*a, **k))

    def step(layers, seed):
        torch.manual_seed(seed)
        trunk = layers[0](torch.randn(2, 4))
        losses = [layers[branch](trunk).square().sum() for branch in (1, 2)]
        (losses[0] + losses[1] if seed % 2 else losses[1] + losses[0]).backward()
        return [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]

    for seed in range(4):
        for one, other in zip(step(towers, seed), step(plain, seed), strict=True):
            torch.testing.assert_close(one, other)
    assert len(cpu_graphs.pools) == 2


def test_a_gradient_that_waits_for_another_path_is_kept(cpu_graphs):
    layers = [Residual(TorchGraphRunner(device=cpu_graphs)) for _ in range(3)]

    def step(first, second, third):
        data = x().requires_grad_()
        hidden = first(data)
        third(hidden + second(hidden)).square().sum().backward()
        return data.grad

    expected = step(*[layer.forward for layer in layers])
    for _ in range(3):
        torch.testing.assert_close(step(*layers), expected)
    assert len(cpu_graphs.pools) == 1


def test_graphs_of_one_pool_in_another_order_are_refused_or_captured_again(cpu_graphs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Residual(TorchGraphRunner(device=cpu_graphs)) for _ in range(2)])
    for _ in range(2):
        model(x().requires_grad_()).sum().backward()
    [first], [second] = map(graphs_of, model)
    held = second(x().requires_grad_())
    with pytest.raises(GraphStateError, match="shares memory"):
        first(x())
    model[0](x().requires_grad_())  # captured again, outside of that memory
    assert [len(graphs_of(layer)) for layer in model] == [2, 1]
    del held
    turned = torch.nn.Sequential(model[1], model[0])
    expected = model[0].forward(model[1].forward(x()))
    assert torch.equal(turned(x().requires_grad_()), expected)
    assert [len(graphs_of(layer)) for layer in model] == [3, 1]
    outer = first(x())
    inner = second(outer)
    with pytest.raises(GraphStateError, match="later layers first"):
        outer.sum().backward(retain_graph=True)
    inner.sum().backward()


def test_a_layer_that_is_deleted_frees_its_graphs(cpu_graphs):
    gc.disable()
    try:
        shared = manager_of(TorchGraphRunner(device=cpu_graphs), warmups=0)
        layers = [Residual(TorchGraphRunner(device=cpu_graphs)), Layer()]
        for _ in range(2):
            layers[0](x()).sum().backward()
        shared(layers[1], (x(),), {}).sum().backward()
        assert (cpu_graphs.num_alive, shared.num_graphs) == (4, 1)
        layers.clear()
        assert (cpu_graphs.num_alive, shared.num_graphs) == (0, 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("change", ["unfreeze", "replace"])
def test_a_layer_whose_parameters_changed_is_captured_again(checked_runner, fresh_log, change):
    layer = Layer()
    layer.linear.bias.requires_grad_(change == "replace")
    manager = manager_of(checked_runner, warmups=0)
    manager(layer, (x(),), {}).sum().backward()
    if change == "unfreeze":
        layer.linear.bias.requires_grad_()
    else:
        layer.linear.bias = torch.nn.Parameter(torch.full((4,), 3.0))
    layer.linear.weight.grad = None
    out = manager(layer, (x(),), {})
    assert torch.equal(out, layer.linear(x()))
    out.sum().backward()
    assert layer.linear.bias.grad.tolist() == [2.0] * 4
    assert manager.num_graphs == 1
    assert "Layer is captured again: 'linear.bias'" in fresh_log.text


def test_outputs_of_the_last_call_are_spoilt_by_the_next():
    """What a device's graph overwrites, the eager runner fills with NaN."""

    def forward(x, ids):
        return x * 2, ids, ids > 0

    layer = torch.nn.Identity()
    spec = GraphSpec(layer, forward, (x(), torch.ones(2, dtype=torch.int64)))
    [graph] = EagerGraphRunner().capture([spec])
    given = x(), torch.ones(2, dtype=torch.int64)
    first = graph(*given)
    assert [float(out.sum()) for out in first] == [16.0, 2.0, 2.0]
    again = graph(first[0], given[1])
    assert again[0].tolist() == [[4.0] * 4] * 2
    assert first[0].isnan().all()
    assert first[1].tolist() == [torch.iinfo(torch.int64).max] * 2
    assert not first[2].any()
    assert given[1].tolist() == [1, 1]
    saved = torch.ones(2, 4, requires_grad=True)
    loss = (graph(*given)[0] * saved).sum()
    graph(*given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_capture_leaves_live_generators_where_they_were(seeded):
    """A device's graphs advance the tracker's generators themselves, not copies of them."""

    class Advancing(EagerGraphRunner):
        def capture(self, specs, **options):
            for generator in get_cuda_rng_tracker().get_states().values():
                torch.rand(3, generator=generator)
            return super().capture(specs, **options)

    seeded(use_cudagraphable_rng=True)
    with get_cuda_rng_tracker().fork():
        expected = torch.rand(3)
    seeded(use_cudagraphable_rng=True)
    manager_of(Advancing(), warmups=0)(Layer(), (x(),), {})
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), expected)


def test_kinds_of_call_are_bounded_and_the_least_recent_is_dropped(caplog):
    class Layer(torch.nn.Linear):
        def forward(self, x, scale=1):
            return super().forward(x) * scale

    layer = Layer(2, 2)
    manager = LocalGraphManager(SimpleNamespace(cuda_graph_warmup_steps=1), max_kinds=3)
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        manager(layer, (x,), {"scale": -1}).sum().backward()
    for scale in range(50):
        for value in (scale, -1):  # the kind -1 is used again and again
            found = manager(layer, (x,), {"scale": value})
            assert torch.equal(found, layer(x, scale=value))
            found.sum().backward()
    assert manager.stats() == {"kinds": 3, "graphs": 1, "dropped_kinds": 48}
    assert len([one for one in caplog.records if "kinds of call" in one.getMessage()]) == 1
    for length in range(1, 9):
        for _ in range(2):
            manager(layer, (torch.ones(length, 2),), {}).sum().backward()
    assert manager.num_graphs == 3
    with pytest.raises(ValueError, match="max_kinds is 0"):
        LocalGraphManager(None, max_kinds=0)
