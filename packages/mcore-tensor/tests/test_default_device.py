"""A default device that the tensors are not on changes no result: nothing is made there unasked."""

import inspect
import sys

import pytest
import torch

import mcore.tensor as package
from mcore.tensor import (
    DivisibilityError,
    GlobalMemoryBuffer,
    GlobalSymmetricMemoryBuffer,
    MakeViewlessTensor,
    WrappedTensor,
    _kernel_make_viewless_tensor,
    assert_viewless_tensor,
    calc_norm,
    current_device,
    destroy_global_memory_buffer,
    divide,
    ensure_divisibility,
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
    resolve_device,
    round_up_to_nearest_multiple,
    safely_set_viewless_tensor_data,
    to_local_if_dtensor,
)
from mcore.tensor.param_flags import PARAM_READY_CALLBACK_ATTR

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (3, 0, 1, 1, 1000, 1000, 1000, 1000, 5000, 70_001)


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(length, generator=generator, device="cpu") for length in LENGTHS]
    return [tensor.to(dtype) for tensor in made]


def flag():
    return torch.zeros(1, dtype=torch.int, device="cpu")


def norms():
    mixed = [tensor for dtype in FLOATS for tensor in tensors(dtype)]
    for lists in ([], [mixed], *([tensors(dtype)] for dtype in FLOATS)):
        for per_tensor in (True, False):
            overflow = flag()
            yield from local_multi_tensor_applier(
                local_multi_tensor_l2_norm, overflow, lists, per_tensor
            )
            yield overflow
    yield calc_norm(mixed)
    yield calc_norm([])


def scaled_copies():
    for source in FLOATS:
        for destination in FLOATS:
            for factor in (0.5, 1.0, torch.tensor(0.5, device="cpu")):
                overflow, lists = flag(), [tensors(source), tensors(destination)]
                local_multi_tensor_scale(1, overflow, lists, factor)
                local_multi_tensor_scale(1, overflow, [lists[1], lists[1]], factor)
                yield from (overflow, *lists[1])


def buffers():
    destroy_global_memory_buffer()
    for memory in (GlobalMemoryBuffer(), get_global_memory_buffer()):
        for shape in ((2, 3), 4, (2, 3)):
            yield memory.get_tensor(shape, torch.float32, "x", device="cpu").fill_(3)
        memory.reserve(9, torch.float32, "y", device="cpu")
        yield memory.nbytes()
    symmetric = GlobalSymmetricMemoryBuffer(1, None)
    yield symmetric.available
    symmetric.symm_mem_hdl = 1
    symmetric.symm_buffer = torch.zeros(16, dtype=torch.uint8, device="cpu")
    yield symmetric.maybe_get_tensor((2, 2), torch.float32)["tensor"]
    yield from (piece for piece, _ in symmetric.maybe_get_tensors([(3, torch.uint8)])["tensors"])


def views():
    base = torch.arange(6.0, device="cpu")
    x = torch.ones(6, device="cpu", requires_grad=True)
    yield _kernel_make_viewless_tensor(base[2:], False)
    yield assert_viewless_tensor(make_viewless_tensor(base[:3], False, False))
    for make in (MakeViewlessTensor.apply, lambda v, r: make_viewless_tensor(v, r, True)):
        (make((x * 2).view(3, 2), True) ** 2).sum().backward()
        yield x.grad
    target = torch.ones(2, device="cpu")
    safely_set_viewless_tensor_data(target, base)
    yield target
    yield WrappedTensor(base).unwrap()


def small_helpers():
    tensor = torch.arange(4.0, device="cpu")
    yield is_dtensor(tensor)
    yield to_local_if_dtensor(tensor)
    yield get_full_tensor_if_necessary(tensor)
    yield get_data_parallel_group_if_dtensor(tensor)
    yield resolve_data_parallel_group([tensor])
    yield maybe_cat(tensor, tensor)
    yield from (param_is_shared(tensor), param_is_not_shared(tensor))
    yield ensure_params_ready([tensor]), getattr(tensor, PARAM_READY_CALLBACK_ATTR, None)
    yield mark_param_shared(tensor)
    yield from (divide(8, 2), ensure_divisibility(8, 2), round_up_to_nearest_multiple(3, 2))
    yield issubclass(DivisibilityError, ValueError)
    yield from (str(current_device()), str(resolve_device("cpu")))


USES = [norms, scaled_copies, buffers, views, small_helpers]


@pytest.mark.parametrize("use", USES)
def test_results_do_not_depend_on_the_default_device(use):
    expected = list(use())
    with torch.device("meta"):  # what torch.set_default_device does
        found = list(use())
    torch.testing.assert_close(
        [value for value in found if isinstance(value, torch.Tensor)],
        [value for value in expected if isinstance(value, torch.Tensor)],
        rtol=0,
        atol=0,
    )
    assert [value for value in found if not isinstance(value, torch.Tensor)] == [
        value for value in expected if not isinstance(value, torch.Tensor)
    ]


def test_every_public_function_is_called():
    source = inspect.getsource(sys.modules[__name__])
    uses = source[source.index("def tensors") :]
    assert [n for n in package.__all__ if n not in uses and n != "__version__"] == []
