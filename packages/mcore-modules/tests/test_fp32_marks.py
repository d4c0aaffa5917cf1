import copy
import pickle

import pytest
import torch

from mcore.modules import (
    convert_module_to_dtype_except_fp32_marked,
    keep_in_fp32,
    mark_keep_in_fp32,
)


class Mixed(torch.nn.Module):
    """Parameters and buffers of many dtypes, one tied pair, one submodule."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("wide", torch.ones(1, dtype=torch.float64))
        self.register_buffer("small", torch.ones(1).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))
        self.register_buffer("spin", torch.ones(1, dtype=torch.complex64))
        self.register_buffer("absent", None)
        self.inner = torch.nn.Linear(2, 2)


def dtypes(module):
    state = module.state_dict(keep_vars=True)
    return {name: tensor.dtype for name, tensor in state.items()}


def test_only_usual_floats_are_cast():
    module = Mixed()
    weight = module.weight
    assert convert_module_to_dtype_except_fp32_marked(module, torch.bfloat16) is module
    assert dtypes(module) == {
        "weight": torch.bfloat16,
        "tied": torch.bfloat16,
        "scale": torch.bfloat16,
        "wide": torch.bfloat16,
        "small": torch.float8_e4m3fn,
        "count": torch.int64,
        "spin": torch.complex64,
        "inner.weight": torch.bfloat16,
        "inner.bias": torch.bfloat16,
    }
    assert module.weight is weight is module.tied


def test_marked_parameters_and_buffers_stay():
    module = Mixed()
    mark_keep_in_fp32(module.scale)
    mark_keep_in_fp32(module.wide)
    assert keep_in_fp32(module, "inner.bias", "weight") is module
    convert_module_to_dtype_except_fp32_marked(module, torch.float16)
    kept = {name for name, dtype in dtypes(module).items() if dtype is torch.float32}
    assert kept == {"weight", "tied", "scale", "inner.bias"}
    assert module.wide.dtype is torch.float64
    assert module.inner.bias.keep_in_fp32 is module.tied.keep_in_fp32 is True


def test_gradients_follow_their_parameters():
    module = keep_in_fp32(torch.nn.Linear(2, 1), "bias")
    module(torch.ones(1, 2)).sum().backward()
    convert_module_to_dtype_except_fp32_marked(module, torch.float16)
    assert module.weight.grad.dtype is torch.float16
    assert module.bias.grad.dtype is torch.float32


def test_names_survive_copies_and_pickles():
    module = keep_in_fp32(torch.nn.Linear(2, 1), "bias")
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        convert_module_to_dtype_except_fp32_marked(copied, torch.float16)
        assert copied.bias.dtype is torch.float32
        assert copied.bias.keep_in_fp32 is True


@pytest.mark.parametrize("name", ["nothing", "inner.nothing", "nowhere.weight", "inner"])
def test_unknown_names_are_refused_and_nothing_is_stored(name):
    module = Mixed()
    with pytest.raises(ValueError, match=name):
        keep_in_fp32(module, "weight", name)
    assert not hasattr(module.weight, "keep_in_fp32")
    assert "_keep_in_fp32_names" not in vars(module)


@pytest.mark.parametrize("dtype", [torch.int64, "float16", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype"):
        convert_module_to_dtype_except_fp32_marked(torch.nn.Linear(1, 1), dtype)
