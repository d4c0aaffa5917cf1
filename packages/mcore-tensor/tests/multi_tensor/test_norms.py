import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore.tensor import local_multi_tensor_applier, local_multi_tensor_l2_norm
from mcore.tensor.multi_tensor import norms

CHUNK = 2048 * 32
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def zero_flag(dtype=torch.int):
    return torch.zeros(1, dtype=dtype)


def floats(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def exact_norms(tensors):
    """Per tensor and together, by float64 arithmetic of the whole tensors."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack([*squares, sum(squares)]).sqrt()


TABLE = [
    ("two tensors", [floats([3, 4]), floats([12])], [13.0], [5.0, 12.0], 0),
    ("an empty one", [floats([3, 4]), floats([]), floats([0])], [5.0], [5.0, 0.0, 0.0], 0),
    ("bf16 ones", [torch.ones(1000, dtype=torch.bfloat16)], [31.622776], [31.622776], 0),
    ("bf16 one by one", [floats([1], torch.bfloat16)] * 1000, [31.622776], [1.0] * 1000, 0),
    ("fp16 in one", [floats([60000] * 4, torch.half)], [120000.0], [120000.0], 0),
    ("fp16 in four", [floats([60000], torch.half)] * 4, [120000.0], [60000.0] * 4, 0),
    ("nan", [floats([1, math.nan])], [math.nan], [math.nan], 1),
    ("inf", [floats([math.inf])], [math.inf], [math.inf], 1),
    ("minus inf", [floats([1]), floats([2, -math.inf])], [math.inf], [1.0, math.inf], 1),
    ("overflow in one", [floats([3e19] * 10)], [math.inf], [math.inf], 1),
    ("overflow in ten", [floats([3e19])] * 10, [math.inf], [math.inf] * 10, 1),
    ("overflow of one element", [floats([3e19])], [math.inf], [math.inf], 1),
    ("overflow of the sum", [floats([1.5e19])] * 10, [math.inf], [1.5e19] * 10, 1),
    ("two dtypes", [floats([3, 4], torch.double), floats([12])], [13.0], [5.0, 12.0], 0),
    ("fp64 beyond fp32", [floats([1e30, 1e30], torch.double)], [2**0.5 * 1e30], [2**0.5 * 1e30], 0),
    ("fp64 to inf", [floats([1e300], torch.double)], [math.inf], [math.inf], 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "norm", "per_tensor", "flag"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_norms_and_flag(tensors, norm, per_tensor, flag):
    for wants_each in (True, False, None):
        noop_flag = zero_flag()
        found, found_each = local_multi_tensor_l2_norm(CHUNK, noop_flag, [tensors], wants_each)
        assert (found.dtype, found.shape) == (torch.float32, (1,))
        torch.testing.assert_close(found, floats(norm), rtol=1e-6, atol=0, equal_nan=True)
        expected_each = floats(per_tensor if wants_each else [])
        assert found_each.dtype == torch.float32
        torch.testing.assert_close(found_each, expected_each, rtol=1e-6, atol=0, equal_nan=True)
        assert noop_flag.item() == flag
        assert not found.requires_grad


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("lists", [[], [[]], [[], []]])
@pytest.mark.parametrize("per_tensor", [True, False])
def test_no_tensors_have_norm_zero(lists, per_tensor):
    for flag in (None, floats([0]).int()):
        norm, each = local_multi_tensor_l2_norm(CHUNK, flag, lists, per_tensor)
        assert norm.tolist() == [0.0]
        assert (each.shape, each.dtype) == ((0,), torch.float32)
    assert flag.tolist() == [0]


@pytest.mark.usefixtures("on_each_device")
def test_only_empty_tensors_have_norm_zero():
    flag = zero_flag()
    tensors = [torch.empty(0), torch.empty(3, 0)]
    norm, each = local_multi_tensor_l2_norm(CHUNK, flag, [tensors], True)
    assert (norm.tolist(), each.tolist(), flag.tolist()) == ([0.0], [0.0, 0.0], [0])


@pytest.mark.usefixtures("on_each_device")
def test_several_ragged_lists_are_one():
    flag = zero_flag()
    lists = [[floats([3, 4])], (floats([12]), floats([[84]])), []]
    norm, each = local_multi_tensor_l2_norm(CHUNK, flag, lists, True)
    assert norm.tolist() == [85.0]
    assert each.tolist() == [5.0, 12.0, 84.0]


@pytest.mark.usefixtures("on_each_device")
def test_a_raised_flag_stays_and_the_norm_is_computed():
    flag = torch.ones(1, dtype=torch.int)
    norm, _ = local_multi_tensor_l2_norm(CHUNK, flag, [[floats([3, 4])]], False)
    assert (norm.tolist(), flag.tolist()) == ([5.0], [1])


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("flag", [torch.zeros((), dtype=torch.int64), torch.zeros(1, 1).byte()])
def test_flags_of_other_shapes_and_integer_types(flag):
    local_multi_tensor_l2_norm(CHUNK, flag, [[floats([math.inf])]], False)
    assert flag.reshape(()).item() == 1


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        (torch.zeros(1), TypeError),
        (torch.zeros(1, dtype=torch.bool), TypeError),
        (0, TypeError),
        (torch.zeros(2, dtype=torch.int), ValueError),
        (torch.zeros(0, dtype=torch.int), ValueError),
    ],
)
def test_other_flags_are_refused(flag, error):
    with pytest.raises(error, match="noop_flag must"):
        local_multi_tensor_l2_norm(CHUNK, flag, [[floats([1])]], False)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_other_dtypes_are_refused_by_index(dtype):
    tensors = [[floats([1])], [floats([1]), torch.zeros(1).to(dtype)]]
    with pytest.raises(TypeError, match=rf"tensor_lists\[1\]\[1\] has dtype {dtype}"):
        local_multi_tensor_l2_norm(CHUNK, zero_flag(), tensors, False)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("lists", [torch.ones(2), [torch.ones(2)], [[3.0]], [[None]]])
def test_what_are_no_lists_of_tensors_is_refused(lists):
    with pytest.raises(TypeError, match="tensor_lists"):
        local_multi_tensor_l2_norm(CHUNK, zero_flag(), lists, False)


@pytest.mark.usefixtures("on_each_device")
def test_further_arguments_and_the_chunk_size_are_ignored():
    norm, _ = local_multi_tensor_l2_norm(-1, None, [[floats([3, 4])]], False, "more", 2)
    assert norm.tolist() == [5.0]


@pytest.mark.usefixtures("on_each_device")
def test_parameters_and_graphs_give_plain_results():
    parameter = torch.nn.Parameter(floats([3, 4]))
    norm, each = local_multi_tensor_l2_norm(CHUNK, None, [[parameter * 1, parameter]], True)
    assert not norm.requires_grad
    assert each.tolist() == [5.0, 5.0]


def strided_tensors(dtype):
    base = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    big = torch.randn(600, 400, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [
        base.t(),
        base[::2, 1::3],
        base.expand(3, 64, 96),
        base.as_strided((8, 8), (1, 3)),
        base.view(8, 8, 96).permute(2, 0, 1),
        big.t(),
        big[:, ::2],
        base.flatten()[::5],
        big.flatten()[1::1],
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_any_layout_is_accepted(dtype, per_tensor):
    tensors = strided_tensors(dtype)
    norm, each = local_multi_tensor_l2_norm(CHUNK, None, [tensors], per_tensor)
    exact = exact_norms(tensors)
    torch.testing.assert_close(norm, exact[-1:].float(), rtol=1e-6, atol=0)
    if per_tensor:
        torch.testing.assert_close(each, exact[:-1].float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_a_long_tensor_is_exact_where_one_float32_sum_is_not(dtype, per_tensor):
    tensor = torch.randn((1 << 22) + 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = tensor.double().norm()
    norm, each = local_multi_tensor_l2_norm(CHUNK, None, [[tensor]], per_tensor)
    assert (norm.double() - exact).abs() / exact < 2e-7
    if per_tensor:
        assert (each.double() - exact).abs() / exact < 2e-7
    if dtype == torch.float32:
        assert (tensor.norm().double() - exact).abs() / exact > 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_tensors_around_the_length_from_which_they_are_not_packed(dtype, per_tensor):
    generator = torch.Generator().manual_seed(0)
    lengths = [norms._LONG + extra for extra in (-1, 0, 1, 5000)]
    tensors = [torch.randn(length, generator=generator).to(dtype) for length in lengths]
    norm, each = local_multi_tensor_l2_norm(CHUNK, None, [tensors], per_tensor)
    assert norm.item() == pytest.approx(torch.cat(tensors).double().norm().item(), rel=2e-6)
    if per_tensor:
        exact = torch.stack([tensor.double().norm() for tensor in tensors])
        torch.testing.assert_close(each.double(), exact, rtol=2e-6, atol=0)


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "every other": lambda tensor: tensor.repeat_interleave(2)[::2],
    "transposed": lambda tensor: tensor[: tensor.numel() // 8 * 8].view(8, -1).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_any_length_are_exact_on_constant_and_random_data(dtype, layout):
    """Constant data is the worst: every addition of equal squares rounds to the same side."""
    generator = torch.Generator().manual_seed(0)
    for length in (1000, 1025, 4096, 4097, 10_000, 16_383, 16_385, 32_767, 32_769, 300_001):
        random = torch.randn(length, generator=generator)
        constants = [torch.full((length,), value) for value in (1.0, 1.1, 1.3, 1.7, 2.3, 3.07)]
        tensors = [LAYOUTS[layout](tensor.to(dtype)) for tensor in (random, *constants)]
        exact = exact_norms(tensors)
        _, each = local_multi_tensor_l2_norm(CHUNK, None, [tensors], True)
        alone = [local_multi_tensor_l2_norm(CHUNK, None, [[t]], False)[0] for t in tensors]
        together, _ = local_multi_tensor_l2_norm(CHUNK, None, [tensors], False)
        for found, expected in ((each, exact[:-1]), (torch.cat(alone), exact[:-1]),
                                (together, exact[-1:])):  # fmt: skip
            assert ((found.double() - expected).abs() / expected).max() < 2e-6, length


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [32, 33, 64, 300, 1024, 1025])
def test_a_long_tensor_with_one_element_left_over(dtype, rows):
    """Its last element, the only large one, is in no full row."""
    tensor = torch.ones(rows * 1024 + 1, dtype=dtype)
    tensor[-1] = 3000.0
    expected = math.sqrt(rows * 1024 + 3000.0**2)
    expected = expected if dtype != torch.bfloat16 else tensor.double().norm().item()
    for per_tensor in (True, False):
        norm, each = local_multi_tensor_l2_norm(CHUNK, None, [[tensor, tensor[:5]]], per_tensor)
        assert norm.item() == pytest.approx(math.hypot(expected, math.sqrt(5)), rel=1e-6)
        if per_tensor:
            assert each.tolist() == pytest.approx([expected, math.sqrt(5)], rel=1e-6)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5000, 50_000])
def test_infinite_and_nan_are_told_apart_at_any_place(dtype, length):
    largest = torch.finfo(dtype).max
    for values, expected in (
        ([math.inf, -math.inf], math.inf),
        ([math.inf, math.nan], math.nan),
        ([-math.inf] * 1500, math.inf),
        ([largest] * 1500, math.inf if dtype != torch.half else largest * math.sqrt(1500)),
    ):
        tensor = torch.zeros(length, dtype=dtype)
        tensor[-len(values) - 7 : -7] = torch.tensor(values)
        for per_tensor in (True, False):
            norm, each = local_multi_tensor_l2_norm(CHUNK, None, [[tensor]], per_tensor)
            assert norm.item() == pytest.approx(expected, rel=1e-6, nan_ok=True)
            assert each.tolist() == (pytest.approx([expected], nan_ok=True) if per_tensor else [])


@pytest.mark.parametrize("length", [10, 20_000])
def test_transforms_and_fake_tensors_outside_of_their_mode(length):
    data = torch.randn(3, length).bfloat16()

    def norms_of(tensor):
        return torch.cat(local_multi_tensor_l2_norm(CHUNK, None, [[tensor, tensor[:4]]], True))

    expected = torch.stack([norms_of(row) for row in data])
    torch.testing.assert_close(torch.vmap(norms_of)(data), expected)
    assert norms_of(FakeTensorMode().from_tensor(data[0])).shape == (3,)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("per_tensor", [True, False])
@pytest.mark.parametrize("wide_first", [True, False])
def test_squares_of_float64_are_not_narrowed_beside_float32(per_tensor, wide_first):
    """The square of 1e30 is beyond float32, its root is not."""
    tensors = [floats([1e30], torch.double), floats([1.0]), floats([1.0], torch.half)]
    order = tensors if wide_first else tensors[::-1]
    flag = zero_flag()
    norm, each = local_multi_tensor_l2_norm(CHUNK, flag, [order], per_tensor)
    assert norm.item() == pytest.approx(1e30, rel=1e-6)
    assert flag.item() == 0
    if per_tensor:
        values = [1e30, 1.0, 1.0] if wide_first else [1.0, 1.0, 1e30]
        assert each.tolist() == pytest.approx(values, rel=1e-6)


def test_many_small_tensors():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1000, generator=generator) for _ in range(2000)]
    exact = exact_norms(tensors)
    norm, each = local_multi_tensor_l2_norm(CHUNK, None, [tensors], True)
    together, _ = local_multi_tensor_l2_norm(CHUNK, None, [tensors], False)
    torch.testing.assert_close(torch.cat((each, norm)), exact.float(), rtol=5e-7, atol=0)
    torch.testing.assert_close(together, norm, rtol=3e-7, atol=0)


lengths = st.sampled_from([0, 1, 2, 3, 7, 1023, 1024, 1025, 4096, 4097, 70_000, 140_001])
described_tensors = st.tuples(lengths, st.sampled_from(FLOATS), st.sampled_from([1e-3, 1.0, 50.0]))
non_finite = st.sampled_from([None, None, math.nan, math.inf, -math.inf])


@settings(deadline=None, max_examples=60)
@given(st.lists(described_tensors, max_size=8), non_finite, st.integers(0, 2**31), st.booleans())
def test_any_tensors_against_float64(described, extra, seed, per_tensor):
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (torch.randn(length, generator=generator) * size).to(dtype)
        for length, dtype, size in described
    ]
    filled = [tensor for tensor in tensors if tensor.numel()]
    if extra is not None and filled:
        chosen = filled[seed % len(filled)]
        chosen[seed % chosen.numel()] = extra
    flag = zero_flag()
    norm, each = local_multi_tensor_l2_norm(CHUNK, flag, [tensors], per_tensor)
    exact = exact_norms(tensors) if tensors else torch.zeros(1)
    torch.testing.assert_close(norm, exact[-1:].float(), rtol=1e-6, atol=0, equal_nan=True)
    if per_tensor:
        torch.testing.assert_close(each, exact[:-1].float(), rtol=1e-6, atol=0, equal_nan=True)
    assert flag.item() == (extra is not None and bool(filled))


@pytest.mark.usefixtures("on_each_device")
def test_no_16_bit_tensor_is_copied_to_float32_as_a_whole():
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargestResult(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.numel = max(self.numel, result.numel())
            return result

    tensor = torch.ones(1 << 24, dtype=torch.bfloat16)
    for per_tensor in (True, False):
        with LargestResult() as largest:
            norm, _ = local_multi_tensor_l2_norm(CHUNK, None, [[tensor]], per_tensor)
        assert norm.item() == 2**12
        assert largest.numel <= tensor.numel() // 8


@pytest.mark.parametrize("per_tensor", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fake_and_meta_tensors_give_shapes(per_tensor, dtype):
    sizes = [(3,), (0,), (5000,), (200, 1000), (3,), (3,), (3,)]

    def check(tensors, flag):
        norm, each = local_multi_tensor_l2_norm(CHUNK, flag, [tensors], per_tensor)
        assert (norm.shape, norm.dtype, norm.device) == ((1,), torch.float32, tensors[0].device)
        assert (each.shape, each.dtype) == ((7 if per_tensor else 0,), torch.float32)

    with FakeTensorMode():
        check([torch.empty(size, dtype=dtype) for size in sizes], zero_flag())
        check([torch.empty(size, dtype=dtype, device="meta") for size in sizes], None)
    meta_flag = torch.zeros(1, dtype=torch.int, device="meta")
    check([torch.empty(size, dtype=dtype, device="meta") for size in sizes], meta_flag)


@pytest.mark.usefixtures("on_each_device")
def test_the_fused_operation_of_accelerators_gives_the_same():
    """It runs on the CPU as well, where it is less exact."""
    tensors = [torch.randn(length) for length in (3, 5000, 200_000)]
    _, each = local_multi_tensor_l2_norm(CHUNK, None, [tensors], True)
    torch.testing.assert_close(norms._compute_norms(tensors), each, rtol=3e-6, atol=0)


@pytest.mark.usefixtures("on_each_device")
def test_in_inference_mode():
    with torch.inference_mode():
        flag = zero_flag()
        norm, each = local_multi_tensor_l2_norm(CHUNK, flag, [[floats([3, 4])] * 5], True)
    assert norm.item() == pytest.approx(math.sqrt(125))
    assert each.tolist() == [5.0] * 5


@pytest.mark.usefixtures("on_each_device")
def test_the_applier_passes_everything_on():
    calls = []

    def op(*args):
        calls.append(args)
        return "result"

    flag, lists = zero_flag(), [[floats([1])]]
    assert local_multi_tensor_applier(op, flag, lists, 1, "more") == "result"
    assert calls == [(65536, flag, lists, 1, "more")]


@pytest.mark.usefixtures("on_each_device")
def test_the_applier_lets_errors_through():
    def op(chunk_size, noop_flag, tensor_lists):
        raise KeyError(chunk_size)

    with pytest.raises(KeyError, match="65536"):
        local_multi_tensor_applier(op, zero_flag(), [[]])


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: norms of tensors on a GPU"
)


@pytest.fixture
def synchronising_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("per_tensor", [True, False])
def test_a_gpu_norm_never_waits_for_the_gpu(per_tensor, synchronising_is_an_error):
    """Checks that no step of a norm with its flag synchronises, for one and for several dtypes."""
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    one = [torch.ones(1000, device="cuda") for _ in range(10)]
    several = [*one, torch.ones(9, device="cuda").half(), torch.ones(7, device="cuda").double()]
    results = [
        local_multi_tensor_l2_norm(CHUNK, flag, [tensors], per_tensor) for tensors in (one, several)
    ]
    torch.cuda.set_sync_debug_mode("default")
    assert [norm.item() for norm, _ in results] == pytest.approx([100.0, math.sqrt(10016)])
    assert flag.item() == 0


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(
    ("tensors", "norm", "per_tensor", "flag"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_gpu_norms_and_flag(tensors, norm, per_tensor, flag):
    """The table of norms on a GPU, where the fused operations run."""
    noop_flag = torch.zeros(1, dtype=torch.int, device="cuda")
    on_gpu = [tensor.cuda() for tensor in tensors]
    found, each = local_multi_tensor_l2_norm(CHUNK, noop_flag, [on_gpu], True)
    close = {"rtol": 1e-5, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(found.cpu(), floats(norm), **close)
    torch.testing.assert_close(each.cpu(), floats(per_tensor), **close)
    assert noop_flag.item() == flag


@pytest.mark.cuda
@needs_cuda
def test_tensors_on_several_devices():
    """Checks that one scalar per device is moved to the device of the first tensor."""
    tensors = [torch.full((2,), 3.0, device="cuda"), torch.full((2,), 4.0)]
    norm, each = local_multi_tensor_l2_norm(CHUNK, zero_flag(), [tensors], True)
    assert norm.device.type == each.device.type == "cuda"
    assert norm.item() == pytest.approx(math.sqrt(50))


@pytest.mark.cuda
@needs_cuda
def test_a_gpu_norm_launches_few_kernels():
    """Checks for at most four kernels beside the fused one for one group, without a flag."""
    tensors = [torch.ones(1000, device="cuda") for _ in range(100)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as alone:
        torch._foreach_norm(tensors, 2, dtype=torch.float32)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as ours:
        local_multi_tensor_l2_norm(CHUNK, None, [tensors], False)
        torch.cuda.synchronize()

    def num_kernels(profile):
        on_gpu = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_gpu for event in profile.events())

    assert num_kernels(ours) <= num_kernels(alone) + 4


def test_squares_of_float64_are_not_narrowed_while_traced():
    """1e30 squared overflows float32."""
    rows = torch.full((2, 3), 1e30, dtype=torch.float64)
    for per_tensor in (False, True):
        found = torch.func.vmap(
            lambda row, each=per_tensor: local_multi_tensor_l2_norm(1, None, [[row]], each)[0]
        )(rows)
        torch.testing.assert_close(found, torch.full((2, 1), 3**0.5 * 1e30))
