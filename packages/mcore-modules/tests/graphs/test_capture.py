import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    Float16Module,
    GraphableMegatronModule,
    GraphStateError,
    register_model_wrapper,
)
from mcore.modules.graphs import (
    EagerGraphRunner,
    capture_graphs,
    delete_graphs,
    is_graph_capturing,
    num_graphs_needed,
    set_current_microbatch,
)
from mcore.parallel.rng import get_cuda_rng_tracker, initialize_rng_tracker

CONFIG = SimpleNamespace(hidden_size=4, cuda_graph_impl="transformer_engine")


class Layer(GraphableMegatronModule):
    def __init__(self, config=CONFIG):
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden_states, mask=None):
        out = self.linear(hidden_states)
        return out if mask is None else out * mask


class RunningRunner(EagerGraphRunner):
    """Runs each layer during the capture as often as a device's runner does."""

    def capture(self, specs, *, num_warmup_iters=3, allow_unused_input=False):
        for spec in specs:
            for _ in range(num_warmup_iters + 1):
                spec.fn(*spec.args, **spec.kwargs)
        return super().capture(specs)


def capture(layers, **options):
    return capture_graphs(layers, 2, 1, **options)


def test_layers_are_captured_in_order_slot_by_slot_without_hooks(runner):
    layers = [Layer(), Layer()]
    for layer in layers:
        layer.setup_manual_hooks(lambda: pytest.fail)
        layer.register_forward_pre_hook(lambda module, args: pytest.fail("hook"))
    capture(layers, num_graphs=2, runner=runner)
    assert runner.events == [("capture", order, slot) for slot in range(2) for order in range(2)]
    assert [len(layer.cuda_graphs) for layer in layers] == [2, 2]
    assert not is_graph_capturing()


def test_each_layer_gets_its_own_graph_of_each_slot():
    layers = [Layer(), Layer(), Layer()]
    capture(layers, num_graphs=2, runner=EagerGraphRunner())
    hidden_states = torch.randn(2, 1, 4)
    for microbatch in range(2):
        for layer in layers:
            set_current_microbatch(layer, microbatch)
            assert torch.equal(layer(hidden_states), layer.linear(hidden_states))


def test_a_pre_hook_put_on_a_layer_after_its_capture_leaves_its_place_to_the_manual_hooks():
    layer, ran = Layer(), []
    capture([layer], runner=EagerGraphRunner())
    layer.setup_manual_hooks(lambda: ran.append)
    layer.register_forward_pre_hook(lambda module, args: pytest.fail("hook"))
    layer(torch.ones(2, 1, 4))
    assert ran == [layer.linear]


def test_a_sample_input_that_is_none_counts_as_absent():
    layer, sample = Layer(), {"hidden_states": torch.ones(2, 1, 4), "mask": None}
    capture([layer], runner=EagerGraphRunner(), sample_inputs=[sample])
    assert torch.equal(layer(torch.ones(2, 1, 4), mask=None), layer.linear(torch.ones(2, 1, 4)))


def test_each_graph_has_inputs_of_its_own():
    specs = []

    class Keeps(EagerGraphRunner):
        def capture(self, given, **options):
            specs.extend(given)
            return super().capture(given)

    layers = [Layer(), Layer()]
    sample = {"hidden_states": torch.ones(3, 1, 4, requires_grad=True), "mask": torch.ones(4)}
    capture(layers, num_graphs=2, runner=Keeps(), sample_inputs=[sample, sample])
    tensors = [tensor for spec in specs for tensor in (*spec.args, *spec.kwargs.values())]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 8
    assert [spec.args[0].shape for spec in specs] == [(3, 1, 4)] * 4
    assert all(spec.args[0].requires_grad and spec.args[0].is_leaf for spec in specs)
    assert not specs[0].kwargs["mask"].requires_grad
    assert set(sample) == {"hidden_states", "mask"}
    out = layers[0](torch.ones(3, 1, 4, requires_grad=True), mask=torch.zeros(4))
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("given", "fields", "expected"),
    [
        ({}, {"cuda_graph_warmup_steps": 5}, 5),
        ({"num_warmup_iters": 0}, {"cuda_graph_warmup_steps": 5}, 0),
        ({}, {}, 3),
    ],
)
def test_warm_ups_come_from_the_argument_or_the_config(given, fields, expected):
    seen = []

    class Keeps(EagerGraphRunner):
        def capture(self, specs, *, num_warmup_iters=3, allow_unused_input=False):
            seen.append((num_warmup_iters, allow_unused_input, is_graph_capturing()))
            return super().capture(specs)

    config = SimpleNamespace(**vars(CONFIG), **fields)
    capture([Layer(config)], runner=Keeps(), **given)
    assert seen == [(expected, True, True)]


def test_the_runner_comes_from_the_layer_or_the_device(runner):
    layer = Layer()
    object.__setattr__(layer, "graph_runner", runner)
    capture([layer])
    assert runner.events == [("capture", 0, 0)]
    capture([Layer()])
    capture([])


def test_a_given_runner_comes_before_that_of_the_layer(runner):
    layer, of_layer = Layer(), RunningRunner()
    object.__setattr__(layer, "graph_runner", of_layer)
    of_layer.capture = lambda *args, **options: pytest.fail("the layer's runner was used")
    capture([layer], runner=runner)
    assert runner.events == [("capture", 0, 0)]


class WithoutMask(Layer):
    """Its samples are of another length, and it leaves the mask out."""

    def get_layer_static_inputs(self, seq_length, micro_batch_size):
        assert (seq_length, micro_batch_size) == (2, 1)
        return {"hidden_states": torch.ones(5, 1, 4), "mask": None}


def test_a_static_input_that_is_none_is_no_input_of_the_graph():
    specs = []

    class Keeps(EagerGraphRunner):
        def capture(self, given, **options):
            specs.extend(given)
            return super().capture(given)

    capture([WithoutMask()], runner=Keeps())
    assert [(spec.args[0].shape, spec.kwargs) for spec in specs] == [((5, 1, 4), {})]


def test_the_buffers_of_all_layers_are_left_alone():
    layers = [Layer(), Counts()]
    capture(layers, runner=RunningRunner())
    assert layers[1].calls.item() == 0


class Counts(Layer):
    """Counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states):
        self.calls += 1
        return self.linear(hidden_states)


class Noisy(Layer):
    """Changes a buffer and draws random numbers, from a tracked stream too."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, hidden_states):
        out = self.norm(self.linear(hidden_states).view(-1, 4)).view_as(hidden_states)
        with get_cuda_rng_tracker().fork("capture-test"):
            out = torch.nn.functional.dropout(out)
        return torch.nn.functional.dropout(out)


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_random_states_and_gradients_are_left_alone(fails):
    tracker = get_cuda_rng_tracker()
    tracker.add("capture-test", 98765)
    try:
        layer, saved, drawn = Noisy(), torch.get_rng_state(), tracker.get_states()
        seeds = set(tracker.seeds_)
        runner = RunningRunner()
        if fails:
            runner.capture = lambda specs, **options: [specs[0].fn(*specs[0].args), 1 / 0]
            with pytest.raises(ZeroDivisionError):
                capture([layer], runner=runner)
        else:
            capture([layer], runner=runner)
        assert layer.norm.num_batches_tracked.item() == 0
        assert layer.norm.running_mean.tolist() == [0.0] * 4
        assert torch.equal(torch.get_rng_state(), saved)
        after = tracker.get_states()
        assert torch.equal(after["capture-test"], drawn["capture-test"])
        assert tracker.seeds_ == seeds
        assert all(parameter.grad is None for parameter in layer.parameters())
    finally:
        tracker.reset()


def test_streams_of_a_tracker_with_live_generators_are_left_alone():
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tracker = get_cuda_rng_tracker()
    try:
        tracker.add("capture-test", 98765)
        capture([Noisy()], runner=RunningRunner())
        with tracker.fork("capture-test"):
            drawn = torch.rand(3)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(98765))
        assert torch.equal(drawn, expected)
        assert tracker.seeds_ == {98765}
    finally:
        initialize_rng_tracker(force_reset=True)


def test_layers_without_parameters_are_captured():
    class Bare(GraphableMegatronModule):
        def forward(self, hidden_states):
            return hidden_states * 2

    layer = Bare(CONFIG)
    capture([layer], runner=EagerGraphRunner())
    assert layer(torch.ones(2, 1, 4, requires_grad=True)).sum().item() == 16.0


def test_a_failing_layer_leaves_no_graphs_and_no_flag():
    class Fails(Layer):
        def forward(self, hidden_states):
            raise ArithmeticError("no")

    layers = [Layer(), Fails()]
    with pytest.raises(ArithmeticError):
        capture(layers, runner=RunningRunner())
    assert [layer.cuda_graphs for layer in layers] == [[], []]
    assert is_graph_capturing() is False


def test_a_runner_that_loses_graphs_is_refused():
    runner = EagerGraphRunner()
    runner.capture = lambda specs, **options: []
    layer = Layer()
    with pytest.raises(GraphStateError, match="0 graphs for 1"):
        capture([layer], runner=runner)
    assert layer.cuda_graphs == []


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda layer: layer.eval(), "evaluation mode"),
        (lambda layer: layer.cuda_graphs.append(None), "has graphs"),
        (lambda layer: layer.register_forward_hook(print), "has hooks"),
        (lambda layer: layer.register_full_backward_hook(print), "has hooks"),
        (lambda layer: layer.register_full_backward_pre_hook(print), "has hooks"),
        (lambda layer: layer.register_forward_pre_hook(print), "setup_manual_hooks"),
    ],
)
def test_layers_that_cannot_be_captured_are_named(spoil, text, runner):
    layers = [Layer(), Layer()]
    spoil(layers[1])
    with pytest.raises(GraphStateError, match=rf"layer 1 \(Layer\).*{text}"):
        capture(layers, runner=runner)
    assert runner.events == []


def test_only_graphable_layers_are_captured():
    with pytest.raises(TypeError, match="Linear"):
        capture([torch.nn.Linear(1, 1)])
    with pytest.raises(TypeError, match="Linear"):
        delete_graphs([torch.nn.Linear(1, 1)])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_graphs": 0}, "num_graphs is 0"),
        ({"sample_inputs": []}, "0 sample inputs for 1 layers"),
        ({"sample_inputs": [{"mask": torch.ones(4)}]}, "hidden_states"),
    ],
)
def test_bad_arguments_are_refused(options, text, runner):
    with pytest.raises(ValueError, match=text):
        capture([Layer()], runner=runner, **options)


@pytest.mark.parametrize("impl", ["none", "local", "transformer_engine"])
def test_graphs_that_no_config_replays_are_warned_about(impl, caplog, runner):
    caplog.set_level(logging.WARNING, logger="mcore.modules")
    layer = Layer()
    layer.config = SimpleNamespace(hidden_size=4, cuda_graph_impl=impl)
    capture([layer], runner=runner)
    warned = f"graphs are captured, but cuda_graph_impl is {impl!r}" in caplog.text
    assert warned is (impl != "transformer_engine")


def test_graphs_of_a_config_without_the_field_are_warned_about(caplog, runner):
    caplog.set_level(logging.WARNING, logger="mcore.modules")
    capture([Layer(SimpleNamespace(hidden_size=4))], runner=runner)
    assert "cuda_graph_impl is 'none'" in caplog.text


def test_delete_frees_graphs_and_hooks_and_may_be_repeated(runner):
    layer = Layer()
    capture([layer], num_graphs=2, runner=runner)
    layer.setup_manual_hooks(lambda: print)
    graphs = list(layer.cuda_graphs)
    for _ in range(2):
        delete_graphs([layer])
        assert (layer.cuda_graphs, layer.cuda_graph_manual_hooks) == ([], [])
    for graph in graphs:
        with pytest.raises(GraphStateError, match="reset"):
            graph(torch.ones(2, 1, 4))
    capture([layer], runner=runner)


def test_delete_frees_graphs_of_local_managers():
    layer = Layer(SimpleNamespace(cuda_graph_impl="local", cuda_graph_warmup_steps=0))
    layer(torch.ones(2, 1, 4))
    assert layer.cudagraph_manager.num_graphs == 1
    delete_graphs([layer])
    assert layer.cudagraph_manager.num_graphs == 0


def test_microbatch_reaches_every_tower_and_wrapped_chunks():
    tower = torch.nn.ModuleDict({"vision": torch.nn.Sequential(Layer()), "text": Layer()})
    tower.vision[0].nested = Layer()
    chunks = [Float16Module(SimpleNamespace(bf16=True), tower), torch.nn.DataParallel(Layer())]
    set_current_microbatch(chunks, 3)
    layers = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, GraphableMegatronModule)
    ]
    assert [layer.current_microbatch for layer in layers] == [3] * 4
    set_current_microbatch(chunks[0], 0)
    assert [layer.current_microbatch for layer in layers] == [0, 0, 0, 3]
    set_current_microbatch(tuple(chunks), 2)
    assert [layer.current_microbatch for layer in layers] == [2] * 4
    with pytest.raises(ValueError, match="microbatch is -1"):
        set_current_microbatch(chunks, -1)


class Holder:
    """A wrapper that is no module."""

    def __init__(self, held):
        self.held = held


def test_microbatch_reaches_a_model_in_a_registered_wrapper():
    register_model_wrapper(Holder, "held")
    layer = Layer()
    set_current_microbatch(Holder(layer), 3)
    assert layer.current_microbatch == 3


def test_numbers_of_graphs():
    assert num_graphs_needed(64, 0, 1) == 1
    assert num_graphs_needed(64, 7, 8) == 1
    assert num_graphs_needed(3, 0, 8) == 3
    assert num_graphs_needed(64, 0, 8, 1) == 8
    assert num_graphs_needed(64, 3, 8, 2) == 64


def collides(num_microbatches, stage, stages, slots):
    """Whether one-forward-one-backward on a stage uses a slot that is in flight."""
    warmups = min(num_microbatches, stages - stage - 1)
    schedule = ["F"] * warmups
    schedule += ["F", "B"] * (num_microbatches - warmups) + ["B"] * warmups
    forwards, backwards, busy = itertools.count(), itertools.count(), set()
    for step in schedule:
        if step == "B":
            busy.remove(next(backwards) % slots)
            continue
        slot = next(forwards) % slots
        if slot in busy:
            return True
        busy.add(slot)
    return False


def test_numbers_of_graphs_are_enough_and_not_too_many():
    for stages, num_microbatches in itertools.product(range(2, 9), range(1, 20)):
        for stage in range(stages):
            slots = num_graphs_needed(num_microbatches, stage, stages)
            assert not collides(num_microbatches, stage, stages, slots)
            assert slots == 1 or collides(num_microbatches, stage, stages, slots - 1)


@pytest.mark.parametrize("arguments", [(0, 0, 1), (1, 1, 1), (1, -1, 2), (1, 0, 0), (1, 0, 2, 0)])
def test_numbers_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="num_microbatches="):
        num_graphs_needed(*arguments)
