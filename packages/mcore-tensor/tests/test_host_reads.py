"""No function of the package reads a tensor on the host, which would block on an accelerator."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mcore.tensor as package
from mcore.tensor import (
    GlobalMemoryBuffer,
    GlobalSymmetricMemoryBuffer,
    MakeViewlessTensor,
    WrappedTensor,
    assert_viewless_tensor,
    calc_norm,
    ensure_params_ready,
    get_data_parallel_group_if_dtensor,
    get_full_tensor_if_necessary,
    get_global_memory_buffer,
    is_dtensor,
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
    make_viewless_tensor,
    mark_param_shared,
    maybe_cat,
    param_is_not_shared,
    param_is_shared,
    resolve_data_parallel_group,
    safely_set_viewless_tensor_data,
    to_local_if_dtensor,
)
from mcore.tensor.param_flags import PARAM_READY_CALLBACK_ATTR


class NoHostReads(TorchDispatchMode):
    """Fails as soon as a value of a tensor is read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a tensor was read on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, float, bool, int, torch.Tensor.__index__], ids=str
)
def test_the_check_notices_reads(read):
    tensor = torch.tensor(3)
    with NoHostReads(), pytest.raises(AssertionError, match="read on the host"):
        read(tensor)


def tensors(dtype):
    lengths = (2, 0, 1, 1, 1, 1, 5000, 70_000, 140_001)
    return [torch.ones(length, dtype=dtype) for length in lengths]


def buffers():
    memory = GlobalMemoryBuffer()
    for shape in [(4,), (2,), (8,)]:
        memory.get_tensor(shape, torch.float32, "x")
        get_global_memory_buffer().reserve(shape, torch.float32, "host reads")
    memory.release()


def symmetric_memory():
    memory = GlobalSymmetricMemoryBuffer(1, None)
    memory.symm_buffer, memory.symm_mem_hdl = torch.empty(16, dtype=torch.uint8), object()
    memory.maybe_get_tensor((2, 2), torch.float32)
    memory.maybe_get_tensors([(3, torch.uint8)])


def viewless():
    view = (torch.ones(4, requires_grad=True) * 2).view(2, 2)
    for keep_graph in (True, False):
        assert_viewless_tensor([make_viewless_tensor(view, True, keep_graph)])
    MakeViewlessTensor.apply(view, True).sum().backward()
    safely_set_viewless_tensor_data(torch.ones(2), torch.ones(3))
    repr(WrappedTensor(view))


def tensors_that_may_be_dtensors():
    tensor = torch.ones(2)
    for function in (
        is_dtensor,
        to_local_if_dtensor,
        get_full_tensor_if_necessary,
        get_data_parallel_group_if_dtensor,
    ):
        function(tensor)
    resolve_data_parallel_group([tensor])


def parameters():
    parameter = torch.nn.Parameter(torch.ones(2))
    setattr(parameter, PARAM_READY_CALLBACK_ATTR, lambda: None)
    ensure_params_ready([parameter])
    mark_param_shared(parameter)
    assert param_is_shared(parameter) is not param_is_not_shared(parameter)
    maybe_cat(parameter, parameter)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def norms():
    flag = torch.zeros(1, dtype=torch.int)
    mixed = [tensor for dtype in FLOATS for tensor in tensors(dtype)]
    for lists in (
        [mixed],
        [mixed, tensors(torch.float32)],
        [],
        [[]],
        *([tensors(d)] for d in FLOATS),
    ):
        for per_tensor in (True, False):
            local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, lists, per_tensor)
    calc_norm(mixed)


def scaled_copies():
    flag = torch.zeros(1, dtype=torch.int)
    for source in FLOATS:
        for destination in FLOATS:
            for factor in (0.5, 1.0, torch.tensor(0.5), torch.tensor(2)):
                lists = [tensors(source), tensors(destination)]
                local_multi_tensor_applier(local_multi_tensor_scale, flag, lists, factor)
                in_place = [lists[1], lists[1]]
                local_multi_tensor_applier(local_multi_tensor_scale, flag, in_place, factor)


@pytest.mark.parametrize(
    "use",
    [
        buffers,
        symmetric_memory,
        viewless,
        tensors_that_may_be_dtensors,
        parameters,
        norms,
        scaled_copies,
    ],
)
def test_nothing_is_read(use):
    with NoHostReads():
        use()


def test_every_function_that_takes_tensors_is_covered():
    with_integers_or_devices_only = {
        "current_device",
        "destroy_global_memory_buffer",
        "divide",
        "ensure_divisibility",
        "resolve_device",
        "round_up_to_nearest_multiple",
    }
    called_by_others = {"_kernel_make_viewless_tensor", "DivisibilityError", "__version__"}
    covered = set(globals()) | with_integers_or_devices_only | called_by_others
    assert set(package.__all__) <= covered
