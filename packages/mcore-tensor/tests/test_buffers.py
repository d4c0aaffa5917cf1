import contextlib
import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mcore.tensor import GlobalMemoryBuffer, assert_viewless_tensor
from mcore.tensor.buffers import _MAX_SHAPES

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: buffers on one or more GPUs"
)


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_request_that_fits_reuses_the_memory():
    buffers = GlobalMemoryBuffer()
    first = buffers.get_tensor((128,), torch.float32, "x")
    for shape in [(128,), (64,), (1,), (4, 25), (), (0, 7), (128,), (64,)]:
        tensor = buffers.get_tensor(shape, torch.float32, "x")
        assert storage_of(tensor) == storage_of(first)
        assert tensor.shape == torch.Size(shape)


def test_a_bigger_request_grows_the_buffer():
    buffers = GlobalMemoryBuffer()
    buffers.get_tensor((128,), torch.float32, "x")
    assert buffers.get_tensor((256,), torch.float32, "x").numel() == 256
    assert buffers.nbytes("x") == 1024


def test_the_default_device_is_the_cpu_without_accelerator():
    if torch.accelerator.is_available():
        expected = torch.accelerator.current_accelerator().type
    else:
        expected = "cpu"
    assert GlobalMemoryBuffer().get_tensor((3, 2), torch.float32, "x").device.type == expected


def test_requests_of_one_name_share_memory():
    buffers = GlobalMemoryBuffer()
    first = buffers.get_tensor((2,), torch.float32, "x", device="cpu")
    second = buffers.get_tensor((2,), torch.float32, "x", device="cpu")
    assert first is not second
    first.fill_(7)
    assert second.tolist() == [7.0, 7.0]


def test_names_and_dtypes_and_devices_have_their_own_memory():
    buffers = GlobalMemoryBuffer()
    tensors = [
        buffers.get_tensor((8,), torch.float32, "x"),
        buffers.get_tensor((8,), torch.bfloat16, "x"),
        buffers.get_tensor((8,), torch.int32, "x"),
        buffers.get_tensor((8,), torch.float32, "y"),
        buffers.get_tensor((8,), torch.float32, ("x", 1)),
        buffers.get_tensor((8,), torch.float32, None),
    ]
    assert len({storage_of(tensor) for tensor in tensors}) == len(tensors)
    assert {tensor.dim() for tensor in buffers.buffer.values()} == {1}
    assert ("x", torch.float32, tensors[0].device) in buffers.buffer


@pytest.mark.parametrize(
    "shape", [(2, 3), [2, 3], torch.Size([2, 3]), 6, (), (0,), (0, 7), [], torch.Size([])]
)
def test_any_sequence_of_integers_is_a_shape(shape):
    buffers = GlobalMemoryBuffer()
    for _ in range(2):
        tensor = buffers.get_tensor(shape, torch.float32, "x")
        assert tensor.shape == torch.Size((shape,) if isinstance(shape, int) else shape)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor._base is None


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (-2, -3), -1])
def test_negative_sizes_are_refused(shape):
    with pytest.raises(ValueError, match="must not have negative entries"):
        GlobalMemoryBuffer().get_tensor(shape, torch.float32, "x")


@pytest.mark.parametrize("shape", [(2.0,), "ab", 2.5, None, torch.tensor([2, 3])])
def test_shapes_of_something_else_are_refused(shape):
    with pytest.raises(TypeError, match="tensor_shape must be an integer or a sequence"):
        GlobalMemoryBuffer().get_tensor(shape, torch.float32, "x")


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("warm", [False, True])
def test_the_shape_is_checked_the_same_way_for_new_and_for_known_buffers(warm):
    buffers = GlobalMemoryBuffer()

    def get(shape):
        if warm:
            for known in ((2,), (3,), (2, 3), (1,), ()):
                buffers.get_tensor(known, torch.float32, "x")
        else:
            buffers.release()
        return buffers.get_tensor(shape, torch.float32, "x").shape

    assert get(map(int, "23")) == (2, 3)
    assert get(iter([2, 3])) == (2, 3)
    assert get(np.int64(3)) == (3,)
    assert get(np.array([2, 3])) == (2, 3)
    assert get((np.int32(2), 3)) == (2, 3)
    assert get(range(2, 4)) == (2, 3)
    for wrong in ((2.0,), [2.0], 2.0, None, "23", torch.tensor(3), torch.tensor([2, 3]), (None,)):
        with pytest.raises(TypeError, match="tensor_shape must be an integer or a sequence of"):
            get(wrong)
    for wrong in (-3, np.int64(-3), (2, -3), map(int, ["-2", "3"])):
        with pytest.raises(ValueError, match="tensor_shape must not have negative entries"):
            get(wrong)


class CountedContext:
    entered = 0

    @contextlib.contextmanager
    def __call__(self):
        self.entered += 1
        yield


def test_the_context_is_entered_around_allocations_only():
    buffers, context = GlobalMemoryBuffer(), CountedContext()
    counts = []
    for shape in [(8,), (8,), (4,), (16,), (2, 8)]:
        buffers.get_tensor(shape, torch.float32, "x", context)
        counts.append(context.entered)
    assert counts == [1, 1, 1, 2, 2]


@contextlib.contextmanager
def some_context():
    yield


@pytest.mark.parametrize(
    "wrong", [some_context(), contextlib.nullcontext(), torch.no_grad(), "pool", 3]
)
def test_a_context_manager_instead_of_its_maker_is_refused(wrong):
    with pytest.raises(TypeError, match="must be a callable without arguments"):
        GlobalMemoryBuffer().get_tensor((2,), torch.float32, "x", wrong)


def test_a_maker_of_something_else_is_refused():
    buffers = GlobalMemoryBuffer()
    with pytest.raises(TypeError, match="must return a context manager, got int"):
        buffers.get_tensor((2,), torch.float32, "x", lambda: 3)
    assert buffers.nbytes() == 0


def failing_maker():
    raise OSError("no pool")


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(("maker", "error"), [(lambda: 3, TypeError), (failing_maker, OSError),
                                              (some_context(), TypeError)])  # fmt: skip
def test_a_bad_context_leaves_the_buffer_as_it_was(maker, error):
    buffers = GlobalMemoryBuffer()
    before = buffers.get_tensor((2,), torch.float32, "x").fill_(7)
    with pytest.raises(error):
        buffers.get_tensor((8,), torch.float32, "x", maker)
    assert buffers.nbytes("x") == 8
    assert buffers.get_tensor((2,), torch.float32, "x").data_ptr() == before.data_ptr()


@pytest.mark.parametrize("maker", [some_context, torch.no_grad, lambda: contextlib.nullcontext()])
def test_makers_of_contexts_are_accepted(maker):
    assert GlobalMemoryBuffer().get_tensor((2,), torch.float32, "x", maker).shape == (2,)


def test_the_old_buffer_is_gone_before_the_bigger_one_is_allocated():
    buffers = GlobalMemoryBuffer()
    buffers.get_tensor((8,), torch.float32, "x")
    (backing,) = map(weakref.ref, buffers.buffer.values())
    alive = []

    @contextlib.contextmanager
    def look():
        gc.collect()
        alive.append(backing() is not None)
        yield

    buffers.get_tensor((16,), torch.float32, "x", look)
    assert alive == [False]


def test_views_are_kept_for_a_limited_number_of_shapes():
    buffers = GlobalMemoryBuffer()
    buffers.reserve((100,), torch.uint8, "x")
    numbers = []
    for length in range(100):
        buffers.get_tensor((length,), torch.uint8, "x")
        numbers += [len(views.by_shape) for views in buffers._views.values()]
    assert max(numbers) <= _MAX_SHAPES


def test_results_pass_the_check_for_views():
    assert_viewless_tensor(GlobalMemoryBuffer().get_tensor((2, 2), torch.float32, "x"))


@pytest.mark.usefixtures("on_each_device")
def test_a_buffer_of_inference_mode_can_be_written_outside():
    buffers = GlobalMemoryBuffer()
    with torch.inference_mode():
        inside = [buffers.get_tensor(shape, torch.float32, "x") for shape in [(4,), (2,), (4,)]]
    for tensor in inside:
        assert not tensor.is_inference()
        tensor.zero_()
    outside = buffers.get_tensor((4,), torch.float32, "x")
    outside.add_(1)
    with torch.inference_mode():
        grown = buffers.get_tensor((8,), torch.float32, "x")
        grown.fill_(2)
    grown.add_(1)
    assert grown.tolist() == [3.0] * 8
    weight = torch.ones(8, requires_grad=True)
    (weight * grown).sum().backward()
    assert weight.grad.tolist() == [3.0] * 8


def test_overwriting_a_buffer_that_backward_needs_is_noticed():
    buffers = GlobalMemoryBuffer()
    saved = buffers.get_tensor((2,), torch.float32, "x", device="cpu").fill_(1)
    loss = (torch.ones(2, requires_grad=True) * saved).sum()
    buffers.get_tensor((1,), torch.float32, "x", device="cpu").fill_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_fake_tensors_are_never_kept(device):
    buffers = GlobalMemoryBuffer()
    real = buffers.get_tensor((4,), torch.float32, "known", device="cpu")
    with FakeTensorMode():
        for name in ("known", "new"):
            fake = buffers.get_tensor((2, 2), torch.float32, name, device=device)
            assert isinstance(fake, FakeTensor)
            assert fake.shape == (2, 2)
    assert list(buffers.buffer) == [("known", torch.float32, torch.device("cpu"))]
    again = buffers.get_tensor((4,), torch.float32, "known", device="cpu")
    assert again.data_ptr() == real.data_ptr()


def test_a_fake_tensor_is_on_the_device_asked_for():
    with FakeTensorMode():
        fake = GlobalMemoryBuffer().get_tensor((2,), torch.float32, "x", device="cuda:3")
    assert fake.device == torch.device("cuda:3")  # no such device is needed


def test_meta_tensors_are_never_kept():
    buffers = GlobalMemoryBuffer()
    with torch.device("meta"):
        assert buffers.get_tensor((4,), torch.float32, "x").is_meta
        assert not buffers.get_tensor((4,), torch.float32, "y", device="cpu").is_meta
    assert buffers.get_tensor((4,), torch.float32, "z", device="meta").is_meta
    assert [name for name, _, _ in buffers.buffer] == ["y"]
    assert not buffers.get_tensor((4,), torch.float32, "x").is_meta


def test_other_default_devices_do_not_matter():
    buffers = GlobalMemoryBuffer()
    expected = buffers.get_tensor((4,), torch.float32, "x")
    with torch.device("cpu"):
        assert buffers.get_tensor((4,), torch.float32, "x").device == expected.device


@pytest.mark.usefixtures("on_each_device")
def test_tensors_made_inside_a_function_transform_are_not_kept():
    buffers = GlobalMemoryBuffer()
    known = buffers.get_tensor((8,), torch.float32, "known", device="cpu")

    def loss(x):
        for name, shape in [("new", (2,)), ("known", (2,))]:
            assert buffers.get_tensor(shape, torch.float32, name, device="cpu").shape == shape
        return (x * 3).sum()

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [3.0, 3.0]
    for name, shape in [("new", (2,)), ("known", (2,))]:
        tensor = buffers.get_tensor(shape, torch.float32, name, device="cpu")
        assert tensor.fill_(1).sum().item() == 2
    assert storage_of(buffers.get_tensor((2,), torch.float32, "known", device="cpu")) == storage_of(
        known
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("device", ["cpu", None])
def test_a_compiled_function_gets_the_real_buffer(known, device):
    buffers = GlobalMemoryBuffer()
    if known:
        buffers.reserve((4,), torch.float32, "x", device=device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(x):
        scratch = buffers.get_tensor((2, 2), torch.float32, "x", device=device)
        scratch.copy_(x.view(2, 2))
        return buffers.get_tensor(4, torch.float32, "x", device=device) * 2

    values = torch.arange(4.0, device=device)
    for factor in (1, 3):
        assert double(values * factor).tolist() == [0.0, 2 * factor, 4 * factor, 6 * factor]
        now = buffers.get_tensor((4,), torch.float32, "x", device=device)
        assert now.tolist() == [0.0, factor, 2 * factor, 3 * factor]
    assert buffers.nbytes() == 16


def test_a_compiled_function_sees_a_buffer_that_grew():
    buffers = GlobalMemoryBuffer()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def write(x):
        buffers.get_tensor(x.shape, torch.float32, "x", device="cpu").copy_(x)

    for length in (2, 5, 3):
        write(torch.full((length,), float(length)))
        now = buffers.get_tensor((length,), torch.float32, "x", device="cpu")
        assert now.tolist() == [length] * length
    assert buffers.nbytes() == 20
    assert buffers.get_tensor((5,), torch.float32, "x", device="cpu").tolist() == [3, 3, 3, 5, 5]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_returns_a_buffer_that_grows_again(backend):
    torch.compiler.reset()
    buffers = GlobalMemoryBuffer()

    @torch.compile(backend=backend, fullgraph=True)
    def get(length):
        return buffers.get_tensor((length,), torch.float32, "x", device="cpu")

    for length in (4, 4, 8, 16):
        scratch = get(length)
        now = buffers.get_tensor((length,), torch.float32, "x", device="cpu")
        assert scratch.shape == (length,)
        assert scratch.data_ptr() == now.data_ptr()
    assert buffers.nbytes() == 64


def test_compiled_code_serves_any_number_of_sizes_while_the_buffer_grows():
    from torch._dynamo.testing import CompileCounterWithBackend  # here: it takes long to import

    torch.compiler.reset()
    buffers, counter = GlobalMemoryBuffer(), CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def total(x):
        scratch = buffers.get_tensor((x.shape[0], 2), x.dtype, "x", device="cpu")
        return scratch.copy_(x).sum()

    for length in (*range(2, 14), 40, 3):
        assert total(torch.ones(length, 2)).item() == 2 * length
    assert counter.frame_count < 6  # a compilation for each size would be refused after eight
    assert buffers.nbytes() == 40 * 2 * 4


def test_nbytes_counts_by_name():
    buffers = GlobalMemoryBuffer()
    buffers.reserve((4,), torch.float32, "x")
    buffers.reserve((4,), torch.float64, "x")
    buffers.reserve((3,), torch.uint8, "y")
    assert buffers.nbytes() == 16 + 32 + 3
    assert buffers.nbytes("x") == 48
    assert buffers.nbytes("z") == 0


def test_release_drops_what_matches_and_says_how_much():
    buffers = GlobalMemoryBuffer()
    for name in ("x", "y"):
        buffers.reserve((4,), torch.float32, name, device="cpu")
        buffers.reserve((4,), torch.float64, name, device="cpu")
    assert buffers.release("x", torch.float64) == 32
    assert buffers.release("x", torch.float64) == 0
    assert buffers.release(dtype=torch.float32, device="cpu") == 32
    assert buffers.release(device="meta") == 0
    assert buffers.nbytes() == 32
    assert buffers.release() == 32
    assert buffers.buffer == {}


def test_none_is_a_name_of_its_own():
    buffers = GlobalMemoryBuffer()
    buffers.reserve((4,), torch.uint8, None, device="cpu")
    buffers.reserve((8,), torch.uint8, "x", device="cpu")
    assert (buffers.nbytes(), buffers.nbytes(None), buffers.nbytes("x")) == (12, 4, 8)
    assert (buffers.release(None), buffers.nbytes()) == (4, 8)
    assert (buffers.release(), buffers.nbytes()) == (8, 0)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_copy_of_what_holds_buffers_starts_without_any(copied):
    model = torch.nn.Linear(2, 2)
    model.scratch = GlobalMemoryBuffer()
    model.scratch.reserve((4,), torch.float32, "x", device="cpu")
    other = (
        copied(model) if copied is not copy.copy else SimpleNamespace(scratch=copied(model.scratch))
    )
    assert type(other.scratch) is GlobalMemoryBuffer
    assert other.scratch is not model.scratch
    assert (other.scratch.nbytes(), model.scratch.nbytes()) == (0, 16)
    assert other.scratch.get_tensor((2,), torch.float32, "x", device="cpu").shape == (2,)


def test_released_memory_is_free_once_the_results_are():
    buffers = GlobalMemoryBuffer()
    tensor = buffers.get_tensor((4,), torch.float32, "x")
    storage = weakref.ref(tensor.untyped_storage())
    buffers.release("x")
    del tensor
    gc.collect()
    assert storage() is None


@pytest.mark.usefixtures("on_each_device")
def test_a_backing_tensor_put_there_by_hand_is_used():
    buffers = GlobalMemoryBuffer()
    buffers.get_tensor((4,), torch.float32, "x", device="cpu")
    mine = torch.arange(8.0)
    buffers.buffer["x", torch.float32, torch.device("cpu")] = mine
    assert buffers.get_tensor((4,), torch.float32, "x", device="cpu").tolist() == [0, 1, 2, 3]
    buffers.buffer.clear()
    fresh = buffers.get_tensor((4,), torch.float32, "x", device="cpu")
    assert storage_of(fresh) != storage_of(mine)


def test_a_frozen_buffer_refuses_to_grow_and_keeps_its_address():
    buffers = GlobalMemoryBuffer()
    first = buffers.get_tensor((4,), torch.float32, "x", device="cpu")
    buffers.freeze()
    with pytest.raises(RuntimeError, match=r"buffer 'x' .* from 16 to 32 bytes"):
        buffers.get_tensor((8,), torch.float32, "x", device="cpu")
    with pytest.raises(RuntimeError, match=r"buffer 'new' .* from 0 to 4 bytes"):
        buffers.reserve((1,), torch.float32, "new", device="cpu")
    with pytest.raises(RuntimeError, match="cannot be released"):
        buffers.release("x")
    assert buffers.release("absent") == 0
    assert buffers.get_tensor((0,), torch.float32, "new", device="cpu").numel() == 0
    assert buffers.get_tensor((2, 2), torch.float32, "x").data_ptr() == first.data_ptr()
    buffers.unfreeze()
    assert buffers.get_tensor((8,), torch.float32, "x", device="cpu").numel() == 8


def test_frozen_within_a_block():
    buffers = GlobalMemoryBuffer()
    with buffers.frozen() as same:
        assert same is buffers
        with pytest.raises(RuntimeError, match="frozen"):
            buffers.get_tensor((1,), torch.float32, "x")
        with buffers.frozen():
            pass
        with pytest.raises(RuntimeError, match="frozen"):
            buffers.get_tensor((1,), torch.float32, "x")
    assert buffers.get_tensor((1,), torch.float32, "x").numel() == 1


def test_threads_that_grow_one_buffer_end_with_one_buffer():
    buffers = GlobalMemoryBuffer()
    start = threading.Barrier(8)
    results = []

    def request(thread):
        start.wait()
        for size in range(1, 200):
            results.append(
                buffers.get_tensor((size,), torch.float32, thread % 2, device="cpu").numel() == size
            )

    threads = [threading.Thread(target=request, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert results == [True] * (8 * 199)
    assert buffers.nbytes() == 2 * 199 * 4


def test_ever_new_shapes_do_not_pile_up_tensors():
    buffers = GlobalMemoryBuffer()
    buffers.reserve((1000,), torch.float32, "x", device="cpu")
    gc.collect()
    gc.freeze()  # neither visits the objects of before
    for size in range(1000):
        buffers.get_tensor((size,), torch.float32, "x", device="cpu")
    gc.collect()
    assert sum(type(item) is torch.Tensor for item in gc.get_objects()) < 32


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
requests = st.lists(
    st.tuples(
        shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.sampled_from("ab")
    ),
    max_size=12,
)


@settings(deadline=None)
@given(requests)
def test_any_sequence_of_requests_grows_to_the_largest_and_shares(wanted):
    buffers = GlobalMemoryBuffer()
    largest = {}
    for shape, dtype, name in wanted:
        tensor = buffers.get_tensor(shape, dtype, name, device="cpu")
        numel = torch.Size(shape).numel()
        largest[name, dtype] = max(largest.get((name, dtype), 0), numel)
        backing = buffers.buffer[name, dtype, torch.device("cpu")]
        assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
        assert storage_of(tensor) == storage_of(backing)
        assert tensor.storage_offset() == 0
        assert tensor._base is None
    assert {key[:2]: backing.numel() for key, backing in buffers.buffer.items()} == largest


@pytest.mark.cuda
@needs_cuda
def test_buffers_live_on_the_current_gpu():
    """Checks that buffers are on CUDA by default, and cuda without an index is the current one."""
    buffers = GlobalMemoryBuffer()
    tensor = buffers.get_tensor((4,), torch.float32, "x")
    assert tensor.device == torch.device("cuda", torch.cuda.current_device())
    assert buffers.get_tensor((4,), torch.float32, "x", device="cuda").data_ptr() == (
        tensor.data_ptr()
    )
    on_cpu = buffers.get_tensor((4,), torch.float32, "x", device="cpu")
    assert on_cpu.device.type == "cpu"


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs: buffers on both")
def test_each_gpu_has_its_own_buffer():
    """Checks that switching the current device gives memory of that device, and back."""
    buffers = GlobalMemoryBuffer()
    with torch.cuda.device(0):
        first = buffers.get_tensor((4,), torch.float32, "x")
    with torch.cuda.device(1):
        second = buffers.get_tensor((4,), torch.float32, "x")
    assert (first.device.index, second.device.index) == (0, 1)


@pytest.mark.cuda
@needs_cuda
def test_the_peak_of_a_growing_gpu_buffer_is_the_new_size():
    """Checks that the old GPU memory is freed before the bigger buffer is allocated."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    buffers = GlobalMemoryBuffer()
    buffers.reserve(64 << 20, torch.uint8, "x")
    buffers.reserve(96 << 20, torch.uint8, "x")
    assert torch.cuda.max_memory_allocated() - before <= 97 << 20
