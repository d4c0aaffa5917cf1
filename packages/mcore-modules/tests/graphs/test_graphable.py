import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    ConfigFieldError,
    GraphableMegatronModule,
    MegatronModule,
)
from mcore.modules.graphs import (
    LocalGraphManager,
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


@pytest.mark.parametrize("config", [config_of(cuda_graph_impl="none"), SimpleNamespace(), None])
def test_attributes_are_there_without_graphs(config):
    layer = GraphableMegatronModule(config, 3)
    assert isinstance(layer, MegatronModule)
    assert layer.vp_stage == 3
    assert (layer.cuda_graphs, layer.cuda_graph_manual_hooks) == ([], [])
    assert layer.current_microbatch == 0
    assert not hasattr(layer, "cudagraph_manager")
    assert GraphableMegatronModule(config).vp_stage is None


def test_local_makes_a_manager_with_the_runner(runner):
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


@pytest.mark.parametrize("size", [None, 0, "2"])
def test_a_parallel_size_that_is_none_is_named(size):
    layer = GraphableMegatronModule(SimpleNamespace(hidden_size=8, context_parallel_size=size))
    with pytest.raises(ValueError, match="context_parallel_size of the configuration is"):
        layer.get_layer_static_inputs(4, 1)


def test_static_inputs_need_a_hidden_size():
    with pytest.raises(ConfigFieldError, match="hidden_size"):
        GraphableMegatronModule(SimpleNamespace()).get_layer_static_inputs(2, 1)


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


def test_copies_share_the_runner(runner):
    layer = Layer(config_of(), graph_runner=runner)
    assert copy.deepcopy(layer).graph_runner is runner
