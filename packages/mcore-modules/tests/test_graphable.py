import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    ConfigFieldError,
    GraphableMegatronModule,
    GraphInputMismatch,
    GraphStateError,
    MegatronModule,
)
from mcore.modules.graphs import (
    EagerGraphRunner,
    LocalGraphManager,
    capture_graphs,
    graph_capturing,
)
from mcore.modules.testing import RecordingRunner


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


def captured(num_graphs=1, runner=None, **fields):
    layer, runner = Layer(config_of(**fields)), runner or RecordingRunner()
    capture_graphs([layer], 2, 1, num_graphs=num_graphs, runner=runner)
    return layer, runner


def counted_pre_hook(layer):
    calls = []
    layer.register_forward_pre_hook(lambda module, args: calls.append(module))
    return calls


def replays(runner):
    return [event for event in runner.events if event[0] == "replay"]


# Construction


@pytest.mark.parametrize("config", [config_of(cuda_graph_impl="none"), SimpleNamespace(), None])
def test_attributes_are_there_without_graphs(config):
    layer = GraphableMegatronModule(config, 3)
    assert isinstance(layer, MegatronModule)
    assert layer.vp_stage == 3
    assert (layer.cuda_graphs, layer.cuda_graph_manual_hooks) == ([], [])
    assert layer.current_microbatch == 0
    assert not hasattr(layer, "cudagraph_manager")
    assert GraphableMegatronModule(config).vp_stage is None


def test_local_makes_a_manager_with_the_runner():
    runner = RecordingRunner()
    layer = Layer(config_of(cuda_graph_impl="local"), graph_runner=runner)
    assert type(layer.cudagraph_manager) is LocalGraphManager
    assert layer.cudagraph_manager.runner is runner
    assert layer.cudagraph_manager.config is layer.config


class ModuleManager(torch.nn.Module):
    def forward(self, module, args, kwargs):
        return module, args, kwargs


class MakesManager(Layer):
    def create_mcore_cudagraph_manager(self, config):
        self.cudagraph_manager = ModuleManager()
        self.cudagraph_manager.config = config


def test_a_subclass_may_make_the_manager():
    layer = MakesManager(config_of(cuda_graph_impl="local"))
    assert type(layer.cudagraph_manager) is ModuleManager
    assert layer.cudagraph_manager.config is layer.config
    given = ModuleManager()
    layer = MakesManager(config_of(cuda_graph_impl="local"), cudagraph_manager=given)
    assert layer.cudagraph_manager is given


def test_managers_and_runners_are_no_part_of_the_model():
    manager, runner = ModuleManager(), torch.nn.Linear(1, 1)
    for layer in (
        Layer(config_of(cuda_graph_impl="local"), cudagraph_manager=manager, graph_runner=runner),
        MakesManager(config_of(cuda_graph_impl="local"), graph_runner=runner),
    ):
        assert [name for name, _ in layer.named_modules()] == ["", "linear"]
        assert set(layer.state_dict()) == {"linear.weight", "linear.bias"}


# Static inputs


@pytest.mark.parametrize(
    ("fields", "length", "shape"),
    [
        (
            {
                "context_parallel_size": 2,
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
            },
            16,
            (4, 2, 8),
        ),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 16, (8, 2, 8)),
        ({}, 5, (5, 2, 8)),
        ({}, 1, (1, 2, 8)),
        ({"sequence_parallel": True}, 3, (3, 2, 8)),
    ],
)
def test_static_inputs_have_the_local_shape(fields, length, shape):
    layer = GraphableMegatronModule(SimpleNamespace(hidden_size=8, **fields))
    inputs = layer.get_layer_static_inputs(length, 2)
    assert set(inputs) == {"hidden_states"}
    hidden_states = inputs["hidden_states"]
    assert hidden_states.shape == shape
    assert hidden_states.requires_grad
    assert hidden_states.is_leaf
    assert (hidden_states == 1).all()


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.float32),
        ({"params_dtype": None}, torch.float32),
        ({"params_dtype": torch.float64}, torch.float64),
        ({"params_dtype": torch.float32, "fp16": True}, torch.float16),
        ({"params_dtype": torch.float32, "bf16": True}, torch.bfloat16),
    ],
)
def test_static_inputs_have_the_dtype_of_the_model(fields, dtype):
    layer = GraphableMegatronModule(SimpleNamespace(hidden_size=8, **fields))
    assert layer.get_layer_static_inputs(2, 1)["hidden_states"].dtype is dtype


def test_static_inputs_lie_on_the_device_of_the_parameters():
    with torch.device("meta"):
        layer = Layer(config_of())
    assert layer.get_layer_static_inputs(2, 1)["hidden_states"].is_meta


@pytest.mark.parametrize(("length", "batch"), [(10, 1), (0, 1), (-4, 1), (4, 0)])
def test_static_inputs_of_bad_sizes_are_refused(length, batch):
    layer = GraphableMegatronModule(SimpleNamespace(hidden_size=8, context_parallel_size=4))
    with pytest.raises(ValueError, match=r"seq_length|micro_batch_size"):
        layer.get_layer_static_inputs(length, batch)


def test_static_inputs_need_a_hidden_size():
    with pytest.raises(ConfigFieldError, match="hidden_size"):
        GraphableMegatronModule(SimpleNamespace()).get_layer_static_inputs(2, 1)


# Dispatch


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_without_layer_graphs_a_call_is_that_of_any_module(impl):
    layer, runner = captured(cuda_graph_impl=impl)
    hooked = counted_pre_hook(layer)
    assert torch.equal(layer(x()), layer.linear(x()))
    assert hooked == [layer]
    assert replays(runner) == []


def test_replays_take_turns_and_tell_the_first_microbatch():
    layer, runner = captured(num_graphs=2)
    for microbatch in range(4):
        layer.current_microbatch = microbatch
        layer(x())
    shapes = ((2, 1, 4),)
    assert replays(runner) == [
        ("replay", 0, 0, True, shapes),
        ("replay", 0, 1, False, shapes),
        ("replay", 0, 0, False, shapes),
        ("replay", 0, 1, False, shapes),
    ]


def test_manual_hooks_run_before_each_replay_and_module_hooks_do_not():
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


def test_evaluation_and_changed_configs_take_the_normal_path():
    layer, runner = captured()
    hooked = counted_pre_hook(layer)
    layer.eval()
    layer(x())
    layer.train()
    layer.config.cuda_graph_impl = "none"
    layer(x())
    assert len(hooked) == 2
    assert replays(runner) == []


def test_a_keyword_input_equals_a_positional_one():
    layer, runner = captured()
    assert torch.equal(layer(hidden_states=x()), layer(x()))
    assert torch.equal(layer(x(), mask=None), layer(x()))
    assert torch.equal(layer(x(), hidden_states=None), layer(x()))
    assert len(set(replays(runner))) == 1


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
def test_bad_arguments_are_refused_before_hooks_and_replays(args, kwargs, text):
    layer, runner = captured()
    hooks = []
    layer.setup_manual_hooks(lambda: hooks.append)
    with pytest.raises(TypeError, match=text):
        layer(*args, **kwargs)
    assert replays(runner) == []
    assert hooks == []


def test_a_wrong_shape_names_both_shapes():
    layer, runner = captured()
    with pytest.raises(
        GraphInputMismatch, match=r"shape is \(3, 1, 4\), captured with \(2, 1, 4\)"
    ):
        layer(x(3))
    assert replays(runner) == []


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
def test_the_questions_answer_with_bools(impl):
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


def test_local_layers_warm_up_then_replay():
    runner = RecordingRunner()
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


def test_offloading_hands_over_a_stream_and_an_event():
    layer, _ = captured(fine_grained_activation_offloading=True)
    args, kwargs = layer._get_te_cuda_graph_replay_args(x())
    assert set(kwargs) == {"is_first_microbatch"}
    layer.offload_module_in_cuda_graph = True
    with pytest.raises(GraphStateError, match="cuda_graph_offload_provider"):
        layer(x())
    layer.cuda_graph_offload_provider = lambda: ("stream", "event")
    args, kwargs = layer._get_te_cuda_graph_replay_args(x())
    assert len(args) == 1
    assert (kwargs["cuda_graph_stream"], kwargs["cuda_graph_event"]) == ("stream", "event")
    layer(x())


def test_replay_arguments_do_not_change_those_of_the_caller():
    layer, _ = captured()
    given = {"hidden_states": x(), "mask": None}
    layer._get_te_cuda_graph_replay_args(**given)
    assert set(given) == {"hidden_states", "mask"}


# Copies


class Uncopyable:
    is_busy = False

    def __deepcopy__(self, memo):
        raise TypeError("no copy")

    def __reduce_ex__(self, protocol):
        raise TypeError("no pickle")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_no_graphs_and_run(duplicate):
    layer = Layer(config_of())
    layer.cuda_graphs = [Uncopyable()]
    layer.cuda_graph_manual_hooks = [(Uncopyable(), ())]
    model = duplicate(torch.nn.Sequential(layer))
    copied = model[0]
    assert (copied.cuda_graphs, copied.cuda_graph_manual_hooks) == ([], [])
    assert torch.equal(model(x()), layer.linear(x()))
    assert len(layer.cuda_graphs) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_a_new_manager(duplicate):
    layer = Layer(config_of(cuda_graph_impl="local", cuda_graph_warmup_steps=0))
    layer(x())
    assert layer.cudagraph_manager.num_graphs == 1
    copied = duplicate(layer)
    assert type(copied.cudagraph_manager) is LocalGraphManager
    assert copied.cudagraph_manager is not layer.cudagraph_manager
    assert copied.cudagraph_manager.num_graphs == 0
    assert copied.cudagraph_manager.config is copied.config
    assert torch.equal(copied(x()), layer.linear(x()))


def test_copies_share_the_runner():
    runner = RecordingRunner()
    layer = Layer(config_of(), graph_runner=runner)
    assert copy.deepcopy(layer).graph_runner is runner


def test_gradients_through_graphs_are_those_of_a_plain_module():
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
