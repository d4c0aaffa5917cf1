import copy
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    GraphableMegatronModule,
    GraphInputMismatch,
    GraphStateError,
)
from mcore.modules.graphs import (
    EagerGraphRunner,
    capture_graphs,
    graph_capturing,
)


def config_of(**fields):
    return SimpleNamespace(**{"hidden_size": 4, "cuda_graph_impl": "transformer_engine", **fields})


class Layer(GraphableMegatronModule):
    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden_states, mask=None):
        out = self.linear(hidden_states)
        return out if mask is None else out * mask


def x(length=2):
    return torch.ones(length, 1, 4, requires_grad=True)


@pytest.fixture
def captured(runner):
    def capture(num_graphs=1, runner=runner, **fields):
        layer = Layer(config_of(**fields))
        capture_graphs([layer], 2, 1, num_graphs=num_graphs, runner=runner)
        return layer, runner

    return capture


def counted_pre_hook(layer):
    calls = []
    layer.register_forward_pre_hook(lambda module, args: calls.append(module))
    return calls


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_without_layer_graphs_a_call_is_that_of_any_module(impl, captured):
    layer, runner = captured(cuda_graph_impl=impl)
    hooked = counted_pre_hook(layer)
    assert torch.equal(layer(x()), layer.linear(x()))
    assert hooked == [layer]
    assert runner.replays == []


def test_replays_take_turns_and_tell_the_first_microbatch(captured):
    layer, runner = captured(num_graphs=2)
    for microbatch in range(4):
        layer.current_microbatch = microbatch
        layer(x())
    shapes = ((2, 1, 4),)
    assert runner.replays == [
        ("replay", 0, 0, True, shapes),
        ("replay", 0, 1, False, shapes),
        ("replay", 0, 0, False, shapes),
        ("replay", 0, 1, False, shapes),
    ]


def test_manual_hooks_run_before_each_replay_and_module_hooks_do_not(captured):
    layer, runner = captured()
    hooked = counted_pre_hook(layer)
    made = []

    def make_hook():
        made.append(len(made))
        return lambda module: runner.events.append(("hook", module))

    layer.setup_manual_hooks(make_hook)
    runner.events.clear()
    for _ in range(2):
        layer(x())
    replay = ("replay", 0, 0, True, ((2, 1, 4),))
    assert runner.events == [("hook", layer.linear), replay] * 2
    assert made == [0]
    assert hooked == []


def test_evaluation_and_changed_configs_take_the_normal_path(captured):
    layer, runner = captured()
    hooked = counted_pre_hook(layer)
    layer.eval()
    layer(x())
    layer.train()
    layer.config.cuda_graph_impl = "none"
    layer(x())
    assert len(hooked) == 2
    assert runner.replays == []


def test_a_keyword_input_equals_a_positional_one(captured):
    layer, runner = captured()
    assert torch.equal(layer(hidden_states=x()), layer(x()))
    assert torch.equal(layer(x(), mask=None), layer(x()))
    assert torch.equal(layer(x(), hidden_states=None), layer(x()))
    assert len(set(runner.replays)) == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((3,), {}, "positional argument 0 is a int"),
        ((x(), None), {}, "positional argument 1 is a NoneType"),
        ((x(),), {"mask": "all"}, "keyword argument 'mask' is a str"),
        ((x(),), {"hidden_states": x()}, "hidden_states is given twice"),
        ((), {}, "hidden_states is missing"),
        ((), {"mask": torch.ones(4)}, "hidden_states is missing"),
    ],
)
def test_bad_arguments_are_refused_before_hooks_and_replays(args, kwargs, text, captured):
    layer, runner = captured()
    hooks = []
    layer.setup_manual_hooks(lambda: hooks.append)
    with pytest.raises(TypeError, match=text):
        layer(*args, **kwargs)
    assert runner.replays == []
    assert hooks == []


def test_a_wrong_shape_names_both_shapes(captured):
    layer, runner = captured()
    with pytest.raises(
        GraphInputMismatch, match=r"shape is \(3, 1, 4\), captured with \(2, 1, 4\)"
    ):
        layer(x(3))
    assert runner.replays == []


def test_replay_without_graphs_is_an_error():
    with pytest.raises(GraphStateError, match="no graphs"):
        Layer(config_of())._te_cuda_graph_replay(x())


def test_while_capturing_a_call_is_the_forward_without_hooks():
    layer = Layer(config_of())
    hooked = counted_pre_hook(layer)
    with graph_capturing():
        assert torch.equal(layer(x()), layer.linear(x()))
    assert hooked == []
    layer.eval()
    with graph_capturing():
        layer(x())
    assert len(hooked) == 1


@pytest.mark.parametrize("impl", ["none", "transformer_engine"])
def test_the_questions_answer_with_bools(impl, captured):
    layer, _ = captured(cuda_graph_impl=impl)
    assert layer._should_call_te_cudagraph(x()) is (impl == "transformer_engine")
    assert layer._should_call_local_cudagraph(x()) is False
    layer.cuda_graphs = []
    assert layer._should_call_te_cudagraph() is False


def test_a_local_manager_gets_the_call_and_its_answer_is_returned():
    layer = Layer(config_of(cuda_graph_impl="local"), cudagraph_manager=lambda *call: call)
    data = x()
    assert layer(data, mask=None) == (layer, (data,), {"mask": None})
    layer.eval()
    layer.cuda_graphs = [None]
    layer.config.cuda_graph_impl = "transformer_engine"
    layer.train()
    assert layer(data) == (layer, (data,), {})


def test_local_layers_warm_up_then_replay(runner):
    layer = Layer(
        config_of(cuda_graph_impl="local", cuda_graph_warmup_steps=1), graph_runner=runner
    )
    expected = layer.linear(x())
    for _ in range(3):
        assert torch.equal(layer(x()), expected)
    assert [event[0] for event in runner.events] == ["capture", "replay", "replay"]


def test_partial_capture_by_override():
    class Partial(Layer):
        def __init__(self, config):
            super().__init__(config)
            self.outer = torch.nn.Linear(4, 4)

        def _get_submodules_under_cudagraphs(self):
            return [self.linear, self.linear]

    layer = Partial(config_of())
    layer.setup_manual_hooks(lambda: print)
    assert layer.cuda_graph_manual_hooks == [(print, (layer.linear,))]
    assert Layer(config_of())._get_submodules_under_cudagraphs()[0].__class__ is Layer


def test_manual_hooks_come_in_module_order_once_per_module_and_replace_older_ones():
    layer = Layer(config_of())
    layer.norm = torch.nn.LayerNorm(4)
    layer.again = layer.linear
    layer.container = torch.nn.ModuleList([torch.nn.Identity()])
    for _ in range(2):
        layer.setup_manual_hooks(lambda: print)
    assert [module for _, (module,) in layer.cuda_graph_manual_hooks] == [layer.linear, layer.norm]


def test_replay_arguments_do_not_change_those_of_the_caller(captured):
    layer, _ = captured()
    given = {"hidden_states": x(), "mask": None}
    layer._get_te_cuda_graph_replay_args(**given)
    assert set(given) == {"hidden_states", "mask"}


def test_gradients_through_graphs_are_those_of_a_plain_module(captured):
    torch.manual_seed(0)
    layer, _ = captured(num_graphs=2, runner=EagerGraphRunner())
    plain = copy.deepcopy(layer.linear)
    inputs = [torch.randn(2, 1, 4, requires_grad=True) for _ in range(2)]
    outputs = []
    for microbatch, data in enumerate(inputs):
        layer.current_microbatch = microbatch
        outputs.append(layer(data))
    with pytest.raises(GraphStateError):
        layer(x())
    for out in outputs:
        out.square().sum().backward()
    for data in inputs:
        plain(data.detach()).square().sum().backward()
    assert torch.equal(layer.linear.weight.grad, plain.weight.grad)
