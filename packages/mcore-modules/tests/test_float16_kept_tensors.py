import copy
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    Float16Module,
    keep_in_fp32,
    mark_keep_in_fp32,
)

BF16 = SimpleNamespace(bf16=True)


class Marked(torch.nn.Module):
    """One parameter and one buffer marked on the tensors, one parameter by name."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.router = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("counts", torch.zeros(2))
        mark_keep_in_fp32(self.router)
        mark_keep_in_fp32(self.counts)
        keep_in_fp32(self.linear, "bias")


KEPT = {"router", "counts", "linear.bias"}


def kept_names(module):
    state = module.state_dict(keep_vars=True)
    marked = {name for name, tensor in state.items() if getattr(tensor, "keep_in_fp32", False)}
    single = {name for name, tensor in state.items() if tensor.dtype is torch.float32}
    assert marked == single
    return marked


@contextmanager
def future_flag(name):
    setter = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
    setter(True)
    try:
        yield
    finally:
        setter(False)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model,
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.to(torch.float16),
        lambda model: torch.nn.Sequential(model).half()[0],
        copy.deepcopy,
        lambda model: copy.deepcopy(copy.deepcopy(model)).half(),
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["built", "half", "bfloat16", "to", "parent", "deepcopy", "twice", "pickle"],
)
def test_marked_tensors_stay_in_float32(change):
    model = change(Float16Module(BF16, Marked()))
    assert kept_names(model) == KEPT
    assert model.module.linear.weight.dtype in {torch.float16, torch.bfloat16}


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("flag", ["overwrite", "swap"])
@pytest.mark.parametrize("change", ["half", "deepcopy"])
def test_marks_survive_conversions_that_replace_parameters(flag, change):
    with future_flag(flag):
        model = Float16Module(BF16, Marked())
        model = model.half() if change == "half" else copy.deepcopy(model)
        assert kept_names(model) == KEPT


def test_marks_survive_a_build_on_the_meta_device():
    with torch.device("meta"):
        model = Float16Module(BF16, Marked())
    model.to_empty(device="cpu")
    assert kept_names(model) == KEPT
    assert not model.module.router.is_meta


@pytest.mark.usefixtures("on_each_device")
def test_all_tensors_follow_the_device():
    model = Float16Module(BF16, Marked()).to("meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert kept_names(model) == KEPT


@pytest.mark.usefixtures("on_each_device")
def test_gradients_of_marked_parameters_keep_their_dtype():
    model = Float16Module(BF16, Marked())
    model.module.router.sum().backward()
    model.half()
    assert model.module.router.grad.dtype is torch.float32


@pytest.mark.usefixtures("on_each_device")
def test_float8_buffers_are_left_alone_later_too():
    module = torch.nn.Linear(1, 1)
    module.register_buffer("small", torch.ones(1).to(torch.float8_e4m3fn))
    model = Float16Module(BF16, module).half()
    assert model.module.small.dtype is torch.float8_e4m3fn


@pytest.mark.usefixtures("on_each_device")
def test_a_mark_made_after_wrapping_becomes_lasting_with_the_next_conversion():
    model = Float16Module(BF16, torch.nn.Linear(1, 1)).float()
    mark_keep_in_fp32(model.module.bias)
    model.half()
    assert kept_names(copy.deepcopy(model)) == {"bias"}


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("through", ["wrapper", "parent"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_assigned_tensors_get_precision_and_marks(through, dtype):
    model = Float16Module(BF16, Marked())
    state = {name: torch.ones_like(t).to(dtype) for name, t in Marked().state_dict().items()}
    if through == "wrapper":
        model.load_state_dict(state, assign=True)
    else:
        parent = torch.nn.Module()
        parent.child = model
        parent.load_state_dict({f"child.{k}": v for k, v in state.items()}, assign=True)
    assert kept_names(model) == KEPT
    assert model.module.linear.weight.dtype is torch.bfloat16
    assert model.module.router.tolist() == [1.0, 1.0]


def test_an_assigned_tensor_of_the_right_dtype_is_used_itself():
    model = Float16Module(BF16, torch.nn.Linear(2, 2, bias=False))
    given = torch.ones(2, 2, dtype=torch.bfloat16)
    model.load_state_dict({"weight": given}, assign=True)
    assert model.module.weight.data_ptr() == given.data_ptr()


def test_a_marked_tensor_is_moved_where_the_others_are_cast_and_moved():
    model = Float16Module(BF16, Marked()).to("meta", torch.float16)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert kept_names(model.module) == KEPT


@pytest.mark.usefixtures("on_each_device")
def test_loading_without_assign_leaves_a_later_cast_alone():
    parent = torch.nn.Module()
    parent.child = Float16Module(BF16, torch.nn.Linear(1, 1))
    parent.float()
    parent.load_state_dict(parent.state_dict())
    assert parent.child.module.weight.dtype is torch.float32
