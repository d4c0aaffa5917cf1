import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore.tensor import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)
from mcore.tensor.multi_tensor import scaling
from mcore.tensor.multi_tensor.scaling import Scratch

CHUNK = 2048 * 32
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def zero_flag():
    return torch.zeros(1, dtype=torch.int)


def floats(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def scale(sources, destinations, factor, flag=None):
    local_multi_tensor_applier(local_multi_tensor_scale, flag, [sources, destinations], factor)


def expected_product(source, factor, dtype):
    """The product in float32, or in float64 where one side is, rounded once."""
    wide = torch.float64 if torch.float64 in (source.dtype, dtype) else torch.float32
    return (source.to(wide) * torch.tensor(factor, dtype=wide)).to(dtype)


TABLE = [
    ("half", floats([1, 2]), 0.5, torch.float32, [0.5, 1], 0),
    ("computed in float32", floats([60000], torch.half), 2.0, torch.float32, [120000], 0),
    ("overflow of the result", floats([60000]), 2.0, torch.half, [math.inf], 0),
    ("nan", floats([1, math.nan]), 1.0, torch.bfloat16, [1, math.nan], 1),
    ("zero times inf", floats([math.inf]), 0.0, torch.float32, [math.nan], 1),
    ("minus inf", floats([-math.inf, 3]), 2.0, torch.float32, [-math.inf, 6], 1),
    ("inf by 16 bits", floats([1, math.inf], torch.half), 2.0, torch.bfloat16, [2, math.inf], 1),
    ("checked copy", floats([1, -2]), 1.0, torch.bfloat16, [1, -2], 0),
    ("checked copy that overflows", floats([1e6]), 1.0, torch.half, [math.inf], 0),
    ("no zero to inf", floats([0.0]), math.inf, torch.float32, [math.nan], 0),
    ("a factor beyond float32", floats([1.0]), 1e39, torch.float32, [math.inf], 0),
    ("a factor below float32", floats([1.0]), -1e39, torch.float32, [-math.inf], 0),
    ("a factor beyond float32, wide", floats([1.0]), 1e39, torch.float64, [1e39], 0),
    ("float64 keeps the factor", floats([1.0], torch.double), 0.1, torch.float64, [0.1], 0),
    ("float64 nan", floats([math.nan, 1], torch.double), 0.5, torch.half, [math.nan, 0.5], 1),
]  # fmt: skip


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("source", "factor", "dtype", "result", "flag"),
    [r[1:] for r in TABLE],
    ids=[r[0] for r in TABLE],
)
@pytest.mark.parametrize("repeat", [1, 70_000])
def test_products_and_flag(source, factor, dtype, result, flag, repeat):
    noop_flag = zero_flag()
    destination = torch.full((len(source) * repeat,), -1.0, dtype=dtype)
    assert scale([source.repeat(repeat)], [destination], factor, noop_flag) is None
    expected = floats(result, torch.double).to(dtype).repeat(repeat)
    torch.testing.assert_close(destination, expected, rtol=0, atol=0, equal_nan=True)
    assert noop_flag.item() == flag


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor([[0.5]])])
def test_in_place(dtype, factor):
    tensors = [floats([1, 2], dtype), floats([4], dtype), torch.empty(0, dtype=dtype)]
    flag = zero_flag()
    scale(tensors, tensors, factor, flag)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 1.0], [2.0], []]
    assert flag.item() == 0


@pytest.mark.usefixtures("on_each_device")
def test_in_place_finds_what_is_not_finite():
    for value in (math.nan, math.inf, -math.inf):
        for dtype in FLOATS:
            tensors, flag = [floats([1], dtype), floats([2, value], dtype)], zero_flag()
            scale(tensors, tensors, 2.0, flag)
            assert flag.item() == 1
            assert tensors[0].item() == 2


@pytest.mark.usefixtures("on_each_device")
def test_some_pairs_in_place_and_others_not():
    shared, source, destination = floats([1, 2]), floats([3]), torch.empty(1)
    scale([shared, source], [shared, destination], 2.0)
    assert (shared.tolist(), source.tolist(), destination.tolist()) == ([2, 4], [3], [6])


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "factor", [2, 2.0, True * 2, np.float32(2), np.float64(2), np.int64(2), np.array(2.0),
               torch.tensor(2), torch.tensor([2.0], dtype=torch.double), torch.tensor(2.0).half()],
)  # fmt: skip
def test_factors(factor):
    destination = torch.empty(2)
    scale([floats([1, 3])], [destination], factor)
    assert destination.tolist() == [2, 6]


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("factor", "error"),
    [
        (1j, TypeError),
        ("two", TypeError),
        ("2.0", TypeError),
        (None, TypeError),
        (torch.tensor(1j), TypeError),
        (torch.ones(2), ValueError),
        (torch.ones(0), ValueError),
    ],
)
def test_other_factors_are_refused(factor, error):
    destination = torch.zeros(1)
    with pytest.raises(error):
        scale([floats([1])], [destination], factor)
    assert destination.item() == 0


@pytest.mark.usefixtures("on_each_device")
def test_the_flag_is_neither_cleared_nor_obeyed():
    flag, destination = torch.ones(1, dtype=torch.int), torch.empty(1)
    scale([floats([3])], [destination], 2.0, flag)
    assert (destination.item(), flag.item()) == (6, 1)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1, 1, 1], [1, 1], "3 source tensors and 2 destination"),
        ([1], [1, 1], "1 source tensors and 2 destination"),
        ([1, 1], [1, 4], "pair 1 has a source of 1 elements and a destination of 4"),
        ([1, 4], [1, 1], "pair 1 has a source of 4 elements"),
    ],
)
def test_lists_that_do_not_match_are_refused_and_nothing_is_written(sources, destinations, message):
    flag = zero_flag()
    outputs = [torch.zeros(length) for length in destinations]
    with pytest.raises(ValueError, match=message):
        scale([torch.full((length,), math.inf) for length in sources], outputs, 2.0, flag)
    assert all((output == 0).all() for output in outputs)
    assert flag.item() == 0


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("num_lists", [0, 1, 3])
def test_there_must_be_two_lists(num_lists):
    with pytest.raises(ValueError, match=f"must be two lists.* got {num_lists} lists"):
        local_multi_tensor_scale(CHUNK, None, [[torch.ones(1)]] * num_lists, 1.0)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("place", [0, 1])
def test_other_dtypes_are_refused_and_nothing_is_written(dtype, place):
    lists = [[floats([1]), floats([1])], [torch.zeros(1), torch.zeros(1)]]
    lists[place][1] = torch.zeros(1).to(dtype)
    with pytest.raises(TypeError, match=rf"tensor_lists\[{place}\]\[1\] has dtype {dtype}"):
        local_multi_tensor_scale(CHUNK, zero_flag(), lists, 2.0)
    assert lists[1][0].item() == 0


def test_a_list_that_changes_between_its_two_uses_is_checked_twice():
    def lists():
        reused = [torch.ones(2)]
        yield reused
        reused[:] = [torch.tensor([3, 5])]
        yield reused

    with pytest.raises(TypeError, match=r"tensor_lists\[1\]\[0\] has dtype torch.int64"):
        local_multi_tensor_scale(CHUNK, None, lists(), 2.0)


def test_sparse_tensors_are_refused_by_index_and_nothing_is_written():
    sparse, zeros = torch.eye(3).to_sparse(), torch.zeros(3, 3)
    message = r"tensor_lists\[{}\]\[1\] has layout torch.sparse_coo"
    with pytest.raises(TypeError, match=message.format(0)):
        scale([torch.ones(3, 3), sparse], [zeros, zeros], 2.0)
    with pytest.raises(TypeError, match=message.format(1)):
        scale([torch.ones(3, 3)] * 2, [zeros, sparse], 2.0)
    with pytest.raises(TypeError, match=message.format(0)):
        local_multi_tensor_l2_norm(CHUNK, None, [[torch.ones(3, 3), sparse]], False)
    assert (zeros == 0).all()


def test_meta_tensors_beside_real_ones_are_refused_by_name():
    real, meta, flag = torch.ones(3), torch.ones(3, device="meta"), zero_flag()
    with pytest.raises(ValueError, match="noop_flag is on cpu"):
        scale([meta], [meta], 2.0, flag)
    with pytest.raises(ValueError, match="noop_flag is on cpu"):
        local_multi_tensor_l2_norm(CHUNK, flag, [[meta]], True)
    for sources, destinations in (([meta], [real]), ([real, real], [real, meta])):
        with pytest.raises(ValueError, match="tensor_lists mixes meta tensors"):
            scale(sources, destinations, 2.0)
    with pytest.raises(ValueError, match="tensor_lists mixes meta tensors"):
        local_multi_tensor_l2_norm(CHUNK, None, [[meta], [real]], True)
    with pytest.raises(ValueError, match="scale is on the meta device"):
        scale([real], [real], torch.ones((), device="meta"))
    assert real.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("on_each_device")
def test_empty_lists_do_nothing():
    flag = zero_flag()
    scale([], [], 2.0, flag)
    scale([torch.empty(0)], [torch.empty(0, 3)], 2.0, flag)
    assert flag.item() == 0


@pytest.mark.usefixtures("on_each_device")
def test_a_pair_of_different_shapes_goes_in_row_major_order():
    source = torch.arange(6.0).view(2, 3)
    for destination in (torch.empty(6), torch.empty(3, 2), torch.empty(2, 3).t()):
        scale([source.t()], [destination], 2.0)
        assert destination.reshape(-1).tolist() == [0, 6, 2, 8, 4, 10]


@pytest.mark.usefixtures("on_each_device")
def test_parameters_may_be_destinations():
    parameter = torch.nn.Parameter(torch.zeros(2))
    source = torch.ones(2, requires_grad=True)
    scale([source * 3], [parameter], 2.0)
    assert parameter.tolist() == [6, 6]
    assert parameter.requires_grad
    assert parameter.grad_fn is None


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("shape", [(64, 96), (1000, 1100)])
@pytest.mark.parametrize("destination_dtype", [torch.float32, torch.bfloat16])
def test_any_layout_is_accepted(shape, destination_dtype):
    source = torch.randn(shape)
    layouts = [
        lambda tensor: tensor,
        lambda tensor: tensor.t().contiguous().t(),
        lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
    ]
    expected = expected_product(source, 0.3, destination_dtype)
    for lay_source in layouts:
        for lay_destination in layouts:
            destination = lay_destination(torch.zeros(shape, dtype=destination_dtype))
            scale([lay_source(source)], [destination], 0.3)
            assert torch.equal(destination, expected)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("length", [6, 140_000])
def test_a_source_that_is_another_name_of_its_destination(length):
    parameter = torch.nn.Parameter(torch.ones(length))
    scale([parameter.data], [parameter], 2.0)
    scale([parameter.data.view(2, -1)], [parameter], 2.0)
    assert (parameter == 4).all()
    parameter.data.fill_(3e38)
    for noop_flag, factor, expected in ((zero_flag(), 2.0, 0), (zero_flag(), 0.0, 1)):
        scale([parameter.data], [parameter], factor, noop_flag)  # finite, infinite afterwards
        assert noop_flag.item() == expected


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.half, torch.float32)])
def test_one_bad_element_in_any_of_many_small_sources_sets_the_flag(dtypes):
    sources = [torch.full((1000,), torch.finfo(dtypes[0]).max, dtype=dtypes[0])] * 1100
    destinations = [torch.empty(1000, dtype=dtypes[1]) for _ in sources]
    for place in (None, 0, 600, 1099):
        given, noop_flag = list(sources), zero_flag()
        if place is not None:
            given[place] = torch.cat([sources[0][1:], floats([math.inf], dtypes[0])])
        scale(given, destinations, 1.0, noop_flag)
        assert noop_flag.item() == (place is not None)


@pytest.mark.usefixtures("on_each_device")
def test_an_expanded_source():
    destination = torch.empty(3, 4)
    scale([torch.arange(4.0).expand(3, 4)], [destination], 2.0)
    assert destination.tolist() == [[0, 2, 4, 6]] * 3


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_16_bit_number_is_scaled_like_in_float32(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for source_dtype in (torch.float16, torch.bfloat16):
        source = bits.view(source_dtype)
        source = source[source.isfinite()]
        flag = zero_flag()
        for factor in (0.3, 3.0, 1.0):
            destination = torch.empty_like(source, dtype=dtype)
            scale([source], [destination], factor, flag)
            expected = expected_product(source, factor, dtype)
            torch.testing.assert_close(destination, expected, rtol=0, atol=0)
        assert flag.item() == 0


lengths = st.sampled_from([0, 1, 2, 5, 1000, 65_536, 65_537, 140_001])
dtypes = st.sampled_from(FLOATS)
described_pairs = st.tuples(lengths, dtypes, dtypes, st.booleans())
factors = st.one_of(
    st.sampled_from([1.0, 0.0, -1.0, 1, math.inf, math.nan]), st.floats(-1e5, 1e5, width=32)
)
non_finite = st.sampled_from([None, None, math.nan, math.inf, -math.inf])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(described_pairs, max_size=6), factors, st.booleans(), non_finite, st.integers(0, 2**31)
)
def test_any_pairs_against_float64(described, factor, as_tensor, extra, seed):
    generator = torch.Generator().manual_seed(seed)
    sources, destinations = [], []
    for length, source_dtype, dtype, in_place in described:
        source = (torch.randn(length, generator=generator) * 100).to(source_dtype)
        sources.append(source)
        destinations.append(source if in_place else torch.full((length,), 7.0, dtype=dtype))
    filled = [source for source in sources if source.numel()]
    if extra is not None and filled:
        chosen = filled[seed % len(filled)]
        chosen[seed % chosen.numel()] = extra
    expected = [
        expected_product(source, factor, destination.dtype)
        for source, destination in zip(sources, destinations, strict=True)
    ]
    flag = zero_flag()
    given_factor = torch.tensor(factor, dtype=torch.double) if as_tensor else factor
    scale(sources, destinations, given_factor, flag)
    for destination, product in zip(destinations, expected, strict=True):
        torch.testing.assert_close(destination, product, rtol=0, atol=0, equal_nan=True)
    assert flag.item() == (extra is not None and bool(filled))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), dtypes, dtypes)
def test_the_path_of_accelerators_gives_the_same(seed, source_dtype, dtype):
    """Run the accelerator's operations on the CPU too, with small blocks."""
    generator = torch.Generator().manual_seed(seed)
    sources = [
        torch.randn(length, generator=generator).to(source_dtype) for length in (3, 900, 4000, 17)
    ]
    destinations = [torch.zeros_like(source, dtype=dtype) for source in sources]
    wide = torch.float64 if torch.float64 in (source_dtype, dtype) else torch.float32
    multiply = scaling._CheckedMultiply(0.3, wide, torch.device("cpu"), 0, False)
    cut_sources, cut_destinations = scaling._cut(sources, destinations, 1000)
    assert max(source.numel() for source in cut_sources) <= 1000
    for batch in scaling._split_into_batches(cut_sources, 1000):
        scaling._scale_batch(cut_sources[batch], cut_destinations[batch], multiply)
    for source, destination in zip(sources, destinations, strict=True):
        assert torch.equal(destination, expected_product(source, 0.3, dtype))
    assert not multiply.non_finite()


def test_a_tensor_beyond_the_limit_is_a_batch_of_its_own():
    """Such as a part of a strided tensor, which is cut into whole rows only."""
    tensors = [torch.empty(length) for length in (5, 2, 1, 7)]
    batches = list(scaling._split_into_batches(tensors, 3))
    assert batches == [slice(0, 1), slice(1, 3), slice(3, 4)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
def test_fake_and_meta_tensors_have_no_data_to_read(source_dtype, dtype):
    sizes = [(3,), (0,), (5000,), (900, 1000)]

    def check(device):
        sources = [torch.empty(size, dtype=source_dtype, device=device) for size in sizes]
        destinations = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        flag = torch.zeros(1, dtype=torch.int, device=device)
        for factor in (0.5, 1.0, torch.ones((), device=device)):
            scale(sources, destinations, factor, flag)
            scale(destinations, destinations, factor, flag)
        assert [destination.shape for destination in destinations] == list(map(torch.Size, sizes))

    with FakeTensorMode():
        check("cpu")
        check("meta")
    check("meta")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source_dtype", [*FLOATS, None])
@pytest.mark.parametrize("length", [3, 70_000, 600_001])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_destinations_count_as_changed(source_dtype, dtype, length, factor):
    destination = torch.ones(length, dtype=dtype)
    in_place = source_dtype is None
    source = destination if in_place else torch.ones(length, dtype=source_dtype)
    versions = destination._version, source._version
    scale([source], [destination], factor)
    assert destination._version > versions[0]
    assert in_place or source._version == versions[1]


@pytest.mark.usefixtures("on_each_device")
def test_autograd_notices_that_a_saved_tensor_was_scaled_in_place():
    weight = torch.ones(1, requires_grad=True)
    hidden = weight * 3
    squared = hidden * hidden
    scale([hidden], [hidden], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                    (torch.bfloat16, torch.float32), (torch.half, torch.bfloat16),
                                    (torch.float64, torch.float32)])  # fmt: skip
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0])
def test_one_bad_element_anywhere_in_a_long_source_sets_the_flag(dtypes, factor):
    """And the largest finite numbers do not, although their sum would be infinite."""
    length = (1 << 20) + 4097 + 5
    source = torch.full((length,), torch.finfo(dtypes[0]).max, dtype=dtypes[0])
    destination = torch.empty(length, dtype=dtypes[1])
    flag = zero_flag()
    scale([source], [destination], factor, flag)
    assert flag.item() == 0
    for place in (0, 4095, 1 << 19, (1 << 20) + 4096, length - 1):
        for bad in (math.nan, math.inf, -math.inf):
            before, flag = source[place].item(), zero_flag()
            source[place] = bad
            scale([source], [destination], factor, flag)
            source[place] = before
            assert flag.item() == 1, place


@pytest.mark.usefixtures("on_each_device")
def test_in_inference_mode():
    outside = torch.zeros(2)
    with torch.inference_mode():
        inside, flag = torch.empty(2, dtype=torch.bfloat16), zero_flag()
        scale([floats([1, 2])] * 2, [inside, outside], 2.0, flag)
    assert (inside.tolist(), outside.tolist(), flag.tolist()) == ([2, 4], [2, 4], [0])
    outside.add_(1)


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: scaling of tensors on a GPU"
)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(
    ("source", "factor", "dtype", "result", "flag"),
    [r[1:] for r in TABLE],
    ids=[r[0] for r in TABLE],
)
def test_gpu_products_and_flag(source, factor, dtype, result, flag):
    """The table of products on a GPU, where the fused operations run."""
    noop_flag = torch.zeros(1, dtype=torch.int, device="cuda")
    destination = torch.full((len(source),), -1.0, dtype=dtype, device="cuda")
    scale([source.cuda()], [destination], factor, noop_flag)
    expected = floats(result, torch.double).to(dtype)
    torch.testing.assert_close(destination.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert noop_flag.item() == flag


@pytest.mark.cuda
@needs_cuda
def test_scaling_on_a_gpu_never_waits_for_the_gpu():
    """Checks that no step synchronises, for any two dtypes and factors on GPU and host."""
    lists = [
        [torch.ones(1000, device="cuda", dtype=dtype) for dtype in order]
        for order in (FLOATS, FLOATS[::-1])
    ]
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    factor = torch.tensor(0.5, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale(*lists, factor, flag)
        scale(*lists, 0.5, flag)
        scale(lists[1], lists[1], 0.5, flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all((tensor == 0.25).all() for tensor in lists[1])
    assert flag.item() == 0


@pytest.mark.cuda
@needs_cuda
def test_sources_and_destinations_on_different_devices():
    """Checks that values, and a factor and flag from elsewhere, move both ways."""
    flag = zero_flag()
    on_gpu, on_cpu = torch.zeros(3, device="cuda"), torch.zeros(3, dtype=torch.half)
    scale([torch.ones(3)], [on_gpu], torch.tensor(3.0), flag)
    scale([on_gpu], [on_cpu], torch.tensor(2.0, device="cuda"), flag)
    assert (on_gpu.tolist(), on_cpu.tolist(), flag.tolist()) == ([3] * 3, [6] * 3, [0])


def test_scratch_requests_of_one_dtype_share_memory():
    scratch = Scratch(8)
    first = scratch.take(8, torch.float32)
    assert scratch.take(3, torch.float32).data_ptr() == first.data_ptr()
    assert scratch.take(3, torch.float64).data_ptr() != first.data_ptr()
    assert (first.shape, first.device.type) == ((8,), "cpu")


def test_a_scratch_request_beyond_the_capacity_gets_more():
    scratch = Scratch(2)
    assert scratch.take(5, torch.int16).shape == (5,)
    assert scratch.take(0, torch.int16).shape == (0,)


@pytest.mark.parametrize("length", [3, 70000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_with_the_negative_bit(length, dtype):
    def negative():
        torch.manual_seed(0)
        return torch.randn(length, dtype=torch.complex64).conj().imag

    expected = 2 * negative().resolve_neg()
    assert negative().is_neg()
    copied = torch.empty(length, dtype=dtype)
    local_multi_tensor_scale(65536, None, [[negative()], [copied]], 2.0)
    assert torch.equal(copied, expected.to(dtype))
    in_place = negative()
    local_multi_tensor_scale(65536, None, [[in_place], [in_place]], 2.0)
    assert torch.equal(in_place.resolve_neg(), expected)
    into, source = negative(), torch.randn(length).to(dtype)
    local_multi_tensor_scale(65536, None, [[source], [into]], 2.0)
    assert torch.equal(into.resolve_neg(), 2 * source.float())
    # One memory, of which one tensor is the negative.
    memory = torch.randn(length, dtype=torch.complex64)
    source, into = memory.conj().imag, memory.imag
    wanted = 2 * source.resolve_neg()
    local_multi_tensor_scale(65536, None, [[source], [into]], 2.0)
    assert torch.equal(into, wanted)


def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for call in (
        lambda: local_multi_tensor_scale(65536, None, [[nested], [nested]], 2.0),
        lambda: local_multi_tensor_l2_norm(65536, None, [[nested]], False),
    ):
        with pytest.raises(TypeError, match=r"tensor_lists\[0\]\[0\] is a nested tensor"):
            call()


def test_a_narrow_destination_on_the_memory_of_its_source():
    """70,000 elements: such long tensors are not packed."""
    source = torch.arange(70_000.0)
    destination = source.view(torch.bfloat16)[:70_000]
    expected = (source * 2).bfloat16()
    scale([source], [destination], 2.0)
    assert torch.equal(destination, expected)


def test_other_strides_on_the_memory_of_the_source_are_no_multiplication_in_place():
    source = torch.arange(90_000.0).view(300, 300)
    with pytest.raises(RuntimeError, match="memory location"):
        scale([source], [source.t()], 2.0)
