import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    ConfigFieldError,
    GraphableMegatronModule,
    GraphStateError,
    MegatronModule,
)
from mcore.modules.graphs import (
    EagerGraphRunner,
    LocalGraphManager,
    capture_graphs,
    delete_graphs,
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


class Deep(GraphableMegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, hidden_states):
        return self.blocks(hidden_states)


def add_hook(layer):
    return layer.blocks[0].register_forward_hook(lambda module, args, out: 2 * out).remove


def add_pre_hook(layer):
    return layer.blocks.register_forward_pre_hook(lambda module, args: None).remove


def add_backward_hook(layer):
    return layer.blocks[1].register_full_backward_hook(lambda module, before, after: None).remove


def evaluate_child(layer):
    layer.blocks[1].eval()
    return layer.blocks[1].train


def add_child(layer):
    layer.blocks.append(torch.nn.Tanh())
    return lambda: layer.blocks.pop(2)


def remove_child(layer):
    child = layer.blocks.pop(1)
    return lambda: layer.blocks.append(child)


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_hook, "blocks.0"),
        (add_pre_hook, "blocks"),
        (add_backward_hook, "blocks.1"),
        (evaluate_child, "blocks.1"),
        (add_child, "blocks.2"),
        (remove_child, "a module"),
    ],
)
def test_a_changed_module_below_a_captured_layer_is_refused(change, name, impl):
    layer, inputs = Deep(config_of(cuda_graph_impl=impl, cuda_graph_warmup_steps=0)), x()
    if impl == "transformer_engine":
        capture_graphs([layer], 2, 1, runner=EagerGraphRunner())
    layer(inputs).sum().backward()
    undo = change(layer)
    with pytest.raises(GraphStateError, match=f"^{name} of Deep"):
        layer(inputs)
    undo()
    layer(inputs).sum().backward()
    change(layer)
    delete_graphs([layer])
    if impl == "transformer_engine":
        capture_graphs([layer], 2, 1, runner=EagerGraphRunner())
    assert torch.equal(layer(inputs), layer.blocks(inputs))


def test_a_module_that_was_removed_and_freed_is_missed():
    layer, inputs = Deep(config_of()), x()
    capture_graphs([layer], 2, 1, runner=EagerGraphRunner())
    del layer.blocks[1]
    with pytest.raises(GraphStateError, match="a module of Deep was removed after the capture"):
        layer(inputs)


def test_a_hook_of_the_layer_itself_after_the_capture_is_refused():
    layer, inputs = Deep(config_of()), x()
    capture_graphs([layer], 2, 1, runner=EagerGraphRunner(strict=False))
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
    ):
        handle = register(print)
        with pytest.raises(GraphStateError, match="hooks, which a graph would leave out"):
            layer(inputs)
        handle.remove()
    layer.setup_manual_hooks(lambda: lambda module: None)
    layer.register_forward_pre_hook(print)  # manual hooks run in its place
    assert torch.equal(layer(inputs), layer.blocks(inputs))


def test_a_hook_of_a_layer_that_captures_itself_runs():
    layer, inputs = Deep(config_of(cuda_graph_impl="local", cuda_graph_warmup_steps=0)), x()
    layer(inputs).sum().backward()
    assert layer.cudagraph_manager.num_graphs == 1
    layer.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(layer(inputs), layer.blocks(inputs) + 1)


class LateWeightGrad(torch.autograd.Function):
    """A projection whose weight gradient is computed by a later call."""

    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        ctx.save_for_backward(x)
        return x @ owner.weight.detach().t()

    @staticmethod
    def backward(ctx, grad):
        [x] = ctx.saved_tensors
        ctx.owner.waiting.append((x, grad))
        return grad @ ctx.owner.weight.detach(), None


class LateLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.waiting = []

    def forward(self, x):
        return LateWeightGrad.apply(x, self)

    def backward_dw(self):
        for x, grad in self.waiting:
            new = grad.reshape(-1, 4).t() @ x.reshape(-1, 4)
            self.weight.grad = new if self.weight.grad is None else self.weight.grad + new
        self.waiting.clear()


class LateExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared_experts, self.routed = LateLinear(), LateLinear()

    def forward(self, x):
        return self.shared_experts(x) + self.routed(x)

    def backward_dw(self, routed_experts=True, shared_experts=False):
        if routed_experts:
            self.routed.backward_dw()
        if shared_experts:
            self.shared_experts.backward_dw()


class LateLayer(GraphableMegatronModule):
    def __init__(self, with_experts=True, **fields):
        super().__init__(SimpleNamespace(**fields))
        self.self_attention = LateLinear()
        self.mlp = LateExperts() if with_experts else torch.nn.Identity()

    def forward(self, hidden_states):
        return self.mlp(torch.tanh(self.self_attention(hidden_states)))


DELAYED = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}


def test_delayed_weight_gradients_are_those_of_autograd():
    layer = LateLayer(**DELAYED)
    inputs = torch.randn(3, 2, 4, requires_grad=True)
    layer.init_backward_dw_wrapper()
    layer(inputs).square().sum().backward()
    first, second, third = (p.detach().clone().requires_grad_() for p in layer.parameters())
    hidden = torch.tanh(inputs.detach() @ first.t())
    (hidden @ second.t() + hidden @ third.t()).square().sum().backward()
    attention, experts = layer.self_attention, layer.mlp
    assert attention.weight.grad is None
    layer.backward_dw_wrapper.backward_dw()
    assert torch.allclose(attention.weight.grad, first.grad, atol=1e-5)
    assert torch.allclose(experts.shared_experts.weight.grad, second.grad, atol=1e-5)
    assert experts.routed.weight.grad is None  # computed by the schedule
    experts.backward_dw()
    assert torch.allclose(experts.routed.weight.grad, third.grad, atol=1e-5)


def test_delayed_weight_gradients_of_shared_experts_come_before_those_of_attention():
    layer, order = LateLayer(**DELAYED), []
    layer.self_attention.backward_dw = lambda: order.append("attention")
    layer.mlp.shared_experts.backward_dw = lambda: order.append("shared experts")
    layer.init_backward_dw_wrapper()
    layer.backward_dw_wrapper.backward_dw()
    assert order == ["shared experts", "attention"]


@pytest.mark.parametrize("field", DELAYED)
def test_without_delayed_weight_gradients_there_is_no_wrapper(field):
    layer = LateLayer(**{**DELAYED, field: False})
    layer.init_backward_dw_wrapper()
    assert layer.backward_dw_wrapper is None
    with pytest.raises(GraphStateError, match=r"init_backward_dw_wrapper\(\) first"):
        layer.set_te_cuda_graph_backward_dw_wrapper()


def test_a_wrapper_needs_a_configuration_and_an_attention():
    with pytest.raises(ValueError, match="has no configuration"):
        GraphableMegatronModule(None).init_backward_dw_wrapper()
    with pytest.raises(TypeError, match="self_attention"):
        GraphableMegatronModule(SimpleNamespace(**DELAYED)).init_backward_dw_wrapper()


def test_the_wrapper_replays_the_graph_of_the_microbatch_once():
    layer, calls = LateLayer(with_experts=False, **DELAYED), []
    layer.init_backward_dw_wrapper()
    with pytest.raises(GraphStateError, match="no graphs"):
        layer.set_te_cuda_graph_backward_dw_wrapper()
    layer.self_attention.backward_dw = lambda: calls.append("eager")
    layer.init_backward_dw_wrapper()
    layer.cuda_graphs = [
        SimpleNamespace(backward_dw=lambda: calls.append(0)),
        SimpleNamespace(backward_dw=lambda: calls.append(1)),
        SimpleNamespace(),  # captured without delayed gradients
    ]
    for microbatch in range(4):
        layer.current_microbatch = microbatch
        layer.set_te_cuda_graph_backward_dw_wrapper()
        layer.backward_dw_wrapper.backward_dw()
    layer.backward_dw_wrapper.backward_dw()
    assert calls == [0, 1, "eager", 0, "eager"]
    layer.cuda_graphs = []
    del layer.self_attention.backward_dw
    assert copy.deepcopy(layer).backward_dw_wrapper is None
    assert pickle.loads(pickle.dumps(layer)).backward_dw_wrapper is None
