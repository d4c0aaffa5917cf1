"""Multi-tensor operations on the stand-in accelerator: values, waits, launches and allocations."""

import math

import pytest
import torch

from mcore.tensor import calc_norm, local_multi_tensor_l2_norm, local_multi_tensor_scale
from standin import launches, no_host_waits

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CHUNK = 2048 * 32


def scale(sources, destinations, factor, flag=None):
    local_multi_tensor_scale(CHUNK, flag, [sources, destinations], factor)


def make(device, dtype=torch.float32, number=100):
    return [torch.full((64,), 2.0, dtype=dtype, device=device) for _ in range(number)]


def new_flag(device):
    return torch.zeros(1, dtype=torch.int, device=device)


@pytest.mark.parametrize("value", [2.0, math.inf, math.nan])
@pytest.mark.parametrize("factor", [0.5, 1.0, 0.0, math.inf, 1e300])
@pytest.mark.parametrize("source_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_products_and_flag_are_those_of_the_cpu(accelerator, source_dtype, dtype, factor, value):
    """Every pair of dtypes, None for a destination that is its source."""

    def run(device):
        sources = [torch.full((n,), 2.0, dtype=source_dtype, device=device) for n in (3, 0, 5)]
        sources[2][4] = value
        outputs = sources
        if dtype is not None:
            outputs = [torch.zeros_like(source, dtype=dtype) for source in sources]
        flag = new_flag(device)
        scale(sources, outputs, factor, flag)
        return [output.cpu() for output in outputs], flag.item()

    expected, flag = run("cpu")
    found, found_flag = run(accelerator)
    assert found_flag == flag == (not math.isfinite(value))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_strided_pairs_are_scaled_in_their_order(accelerator):
    source = torch.arange(12.0, device=accelerator).view(3, 4).t()
    narrow = [torch.zeros(4, 3, dtype=torch.bfloat16, device=accelerator) for _ in range(2)]
    narrow[1] = narrow[1].view(3, 4).t()
    scale([source, source], narrow, 2.0)
    for output in narrow:
        assert torch.equal(output.cpu().float(), source.cpu() * 2)


def test_a_pinned_source_may_be_overwritten_after_the_call(accelerator):
    source = torch.ones(1000, pin_memory=True)
    destination = torch.zeros(1000, device=accelerator)
    scale([source], [destination], 3.0)
    source.fill_(7)
    assert torch.equal(destination.cpu(), torch.full((1000,), 3.0))


def test_a_pinned_factor_may_be_overwritten_after_the_call(accelerator):
    factor = torch.full((), 3.0, pin_memory=True)
    tensors = make(accelerator)
    scale(tensors, tensors, factor)
    factor.fill_(7)
    assert tensors[0].tolist() == [6.0] * 64


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_scaling_never_waits(accelerator, factor):
    flag = new_flag(accelerator)
    lists = {dtype: make(accelerator, dtype) for dtype in FLOATS}
    with no_host_waits():
        for source in FLOATS:
            for destination in FLOATS:
                scale(lists[source], lists[destination], factor, flag)
        scale(make("cpu"), lists[torch.float32], factor, flag)
    assert flag.item() == 0


def test_norms_never_wait_and_are_right(accelerator):
    tensors = [tensor for dtype in FLOATS for tensor in make(accelerator, dtype, 4)]
    flag = new_flag(accelerator)
    with no_host_waits():
        norm, each = local_multi_tensor_l2_norm(CHUNK, flag, [tensors], True)
        whole = calc_norm([*tensors, torch.zeros(0, device=accelerator)])
    assert norm.item() == whole.item() == pytest.approx(math.sqrt(16 * 64 * 4))
    assert each.tolist() == [16.0] * 16
    assert flag.item() == 0


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_a_norm_that_is_not_finite_sets_the_flag(accelerator, value):
    flag = new_flag(accelerator)
    tensors = make(accelerator)
    tensors[7][3] = value
    norm, _ = local_multi_tensor_l2_norm(CHUNK, flag, [tensors], False)
    assert not math.isfinite(norm.item())
    assert flag.item() == 1


def test_launches_of_norms(accelerator):
    wide, narrow = make(accelerator), make(accelerator, torch.bfloat16)
    with launches(at_most=5):
        calc_norm(wide)
    with launches(at_most=8):
        calc_norm(wide + narrow)
    flag = new_flag(accelerator)
    with launches(at_most=7):
        local_multi_tensor_l2_norm(CHUNK, flag, [wide], False)


def test_launches_and_allocations_of_scaled_copies(accelerator):
    wide, narrow = make(accelerator), make(accelerator, torch.bfloat16)
    flag, factor = new_flag(accelerator), torch.ones((), device=accelerator)
    for scaled_by in (0.5, factor):
        with launches(at_most=3, allocations=1):
            scale(wide, wide, scaled_by, flag)
        with launches(at_most=5, allocations=3):
            scale(wide, narrow, scaled_by, flag)
        with launches(at_most=4, allocations=3):
            scale(narrow, wide, scaled_by, flag)


def test_squares_of_float64_are_not_narrowed(accelerator):
    """1e30 squared overflows float32."""
    tensors = [torch.full((3,), 1e30, dtype=torch.float64, device=accelerator)]
    for per_tensor in (False, True):
        norm, _ = local_multi_tensor_l2_norm(CHUNK, None, [tensors], per_tensor)
        torch.testing.assert_close(norm.cpu(), torch.full((1,), 3**0.5 * 1e30))
